"""One file per command, or per group of related commands: parse, call, print."""
