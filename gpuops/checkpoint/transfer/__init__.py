"""Images between nodes over TCP: chunks, digests, several connections at once.

`server` offers what a node holds, `client` asks for it, `parallel` uses several connections and
peers, `chunks` tracks which chunks are there and verified, `connection` and `wire` are the
protocol. Both sides prove that they belong to the job before either reads anything else
(`gpuops.host.net.job_proof`). A chunk counts when its digest is right; a bad one is asked for
elsewhere.
"""
