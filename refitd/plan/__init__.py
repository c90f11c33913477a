"""What moves: rosters in, one exact plan out. Pure."""
