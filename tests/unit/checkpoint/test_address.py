"""An address at which no states can be kept is refused before anything is started."""

from importlib.util import find_spec

import pytest

from gpuops.checkpoint.storage.address import COMMON_PROTOCOLS, AddressError, check_address


@pytest.mark.parametrize(
    "address", ["ckpt", "/data/run 1", "./s3:x", "file:///data", "s3://bucket/run", "memory://x"]
)
def test_directories_and_urls_of_known_kinds_are_fine(address):
    check_address(address)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("foo://x", "foo://x: unknown protocol 'foo'; .* begins with s3, gs"),
        ("://x", "unknown protocol ''"),
        ("https://host/bucket", r"https:// is read-only.*AWS_ENDPOINT_URL"),
        ("s3:/bucket/run", "s3:/bucket/run: a URL begins with s3://; for a directory use ./"),
        ("s3:bucket", "a URL begins with s3://"),
    ],
)
def test_what_is_none_is_told_in_one_sentence(address, said):
    with pytest.raises(AddressError, match=said) as caught:
        check_address(address)

    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 64


def test_a_package_that_is_missing_is_named():
    packages = {"gs": "gcsfs", "az": "adlfs", "oci": "ocifs", "sftp": "paramiko", "smb": "smb"}
    missing = [kind for kind, package in packages.items() if find_spec(package) is None]
    assert missing, f"all of {packages} are installed: nothing can be missing"

    for kind in missing:
        assert kind in COMMON_PROTOCOLS
        with pytest.raises(AddressError, match=packages[kind]) as caught:
            check_address(f"{kind}://user:word@host/x")
        assert "word" not in str(caught.value)
