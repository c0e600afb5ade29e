"""Network of this host: framed messages, proof of a job's token, interfaces, traffic."""
