"""Images between nodes over TCP: chunks, digests, several connections at once.

`server` serves a node's copies, `client` requests them, `parts` parts of them, `parallel` uses
several connections and peers, `chunks` tracks which chunks are there and verified, `connection` and
`wire` are the protocol. Both sides prove that they belong to the job before either reads anything
else (`gpuops.host.net.job_proof`). A chunk counts when its digest matches; a corrupt one is
requested elsewhere.
"""
