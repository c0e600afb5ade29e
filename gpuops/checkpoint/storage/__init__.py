"""States in a directory or an object store.

`address.open_store` returns a store for an address; `api` is what both kinds do. A state becomes
visible when its manifest is written; a writer that dies leaves nothing that looks complete.

* `directory`, `directory_writer`, `directory_lock`, `directory_files`: local disks and file systems
  that nodes share. Writers of several nodes complete one state together.
* `object_store`, `object_writer`, `object_tree`: any URL that fsspec knows.
* `image_file`: an image to and from a file, with O_DIRECT where it helps.
* `persist` writes a state, several shards at a time, and applies retention; `persister` decides
  when, in the keeper, and `persist_task` is what it runs in a thread. `read_back` reads what was
  written.
* `inspection`: a state as tensors instead of shards, and its verification.
"""
