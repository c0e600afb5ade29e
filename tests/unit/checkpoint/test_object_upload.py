"""An upload in parts of which S3 says that it is gone: done, or to be made again."""

import os
from pathlib import Path

import pytest

from gpuops.checkpoint.storage.object_tree import ObjectTree, Retrying
from gpuops.checkpoint.types import CheckpointError
from gpuops.host.clock import FakeClock

CONTENT = b"of a shard"


class GoneError(Exception):
    """As of botocore."""

    def __init__(self, code):
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 404}}


class FakeS3:
    """A file system of fsspec whose first uploads end in *codes*; *keeps* what such a one wrote."""

    protocol = ("s3", "s3a")

    def __init__(self, *codes, keeps=lambda content, metadata: None):
        self.codes, self.keeps, self.objects, self.n_uploads = list(codes), keeps, {}, 0

    def put_file(self, source, path, callback, **options):
        with Path(source).open("rb") as file:
            content, metadata = file.read(), options["Metadata"]
        self.n_uploads += 1
        if not self.codes:
            self.objects[path] = content, metadata
            return
        if (kept := self.keeps(content, metadata)) is not None:
            self.objects[path] = kept
        raise FileNotFoundError("gone") from GoneError(self.codes.pop(0))

    def info(self, path):
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": len(self.objects[path][0])}

    def metadata(self, path):
        return self.objects[path][1]

    def invalidate_cache(self):
        pass


def upload(filesystem):
    clock = FakeClock()
    retrying = Retrying(60.0, clock, sleep=clock.advance, random=lambda: 0.5)
    fd = os.memfd_create("source")
    try:
        os.write(fd, CONTENT)
        os.lseek(fd, 0, os.SEEK_SET)
        tree = ObjectTree(filesystem, "bucket/run", "s3://bucket/run", retrying)
        tree.upload("key", fd, lambda _nbytes: None)
    finally:
        os.close(fd)


def test_what_it_wrote_whole_before_it_was_gone_is_taken():
    filesystem = FakeS3("NoSuchUpload", keeps=lambda *whole: whole)

    upload(filesystem)

    assert filesystem.n_uploads == 1
    assert filesystem.objects["bucket/run/key"][0] == CONTENT


@pytest.mark.parametrize(
    "keeps",
    [
        lambda _content, _metadata: None,
        lambda content, metadata: (content[1:], metadata),
        lambda content, _metadata: (content, {}),
        lambda content, _metadata: (content, {"gpuops-upload": "of another run"}),
    ],
    ids=["nothing", "a part", "of somebody", "of another run"],
)
def test_where_something_else_is_there_it_is_made_again(keeps):
    filesystem = FakeS3("NoSuchUpload", "NoSuchUpload", keeps=keeps)

    upload(filesystem)

    assert filesystem.n_uploads == 3
    assert filesystem.objects["bucket/run/key"][0] == CONTENT


def test_a_bucket_that_is_not_there_is_told_at_once():
    filesystem = FakeS3("NoSuchBucket")

    with pytest.raises(CheckpointError, match="does the bucket exist"):
        upload(filesystem)

    assert filesystem.n_uploads == 1
