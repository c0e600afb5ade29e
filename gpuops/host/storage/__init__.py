"""File systems and drives of this host, each asked in a child that may be left behind."""
