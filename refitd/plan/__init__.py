"""Turn rosters into one exact plan of copies. Pure: no sockets, no torch."""
