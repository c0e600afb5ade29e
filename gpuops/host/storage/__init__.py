"""File systems and drives of this host, each read in a child that may be abandoned."""
