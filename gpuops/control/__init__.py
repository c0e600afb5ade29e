"""How the agents of one run agree: a board that all can reach, and one record changed by CAS."""
