"""What a store's errors say, and that they say nothing of credentials."""

from __future__ import annotations

import json
import sys
import traceback
import uuid

import pytest
import refusing

import monsess as ms
from monsess.log import mask, secrets_of


def message(url: str, options: dict[str, str] | None = None) -> str:
    """The text of the error when the checkpoints at ``url`` are listed."""
    with pytest.raises(ms.StorageError) as caught:
        ms.CheckpointStore(url, options).steps()
    return str(caught.value)


def lack(monkeypatch: pytest.MonkeyPatch, module: str, protocol: str) -> None:
    """Have fsspec find that ``module`` is not installed."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)


def test_missing_s3fs_names_the_extra(monkeypatch):
    lack(monkeypatch, "s3fs", "s3")
    assert "pip install 'monsess[s3]'" in message("s3://bucket/run")
    assert "pip install 'monsess[s3]'" in message("dir::s3://bucket/run")


def test_missing_gcsfs_names_the_extra(monkeypatch):
    lack(monkeypatch, "gcsfs", "gs")
    assert "pip install 'monsess[gcs]'" in message("gs://bucket/run")


def test_missing_package_of_another_protocol(monkeypatch):
    lack(monkeypatch, "adlfs", "abfs")
    text = message("abfs://container/run")
    assert "adlfs" in text
    assert "Install the package that serves this protocol." in text


def test_unknown_protocol_is_a_matter_of_spelling():
    text = message("foo://x")
    assert "Protocol not known: foo" in text
    assert "Check the spelling" in text


def test_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("x")
    for url in (tmp_path / "file", tmp_path / "file" / "run"):
        assert "A file is in the way" in message(str(url))
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("url", ["s3:/bucket/run", "file:/tmp/run", "memory:/run"])
def test_url_with_one_slash_is_no_local_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"a slash missing: expected (s3|file|memory)://"):
        ms.MonitoredTrainingSession(lambda: 0, checkpoint_dir=url)
    assert list(tmp_path.iterdir()) == []
    assert ms.CheckpointStore(f"./{url}").steps() == []


def test_credentials_that_the_store_repeats_are_not_shown():
    secrets = {"key": "AKIAEXAMPLE", "secret": "s3cr3t/+=", "client_kwargs": {"aws_session_token": "t0ken-t0ken"}}
    url = f"refusing://anna:pass%40word@host-{uuid.uuid4().hex}/run"

    def repeat(operation: str, path: str) -> None:
        raise PermissionError(f"{path}: AKIAEXAMPLE may not, s3cr3t/+= t0ken-t0ken") from ValueError("pass@word")

    with refusing.refusing(repeat), pytest.raises(ms.StorageError) as caught:
        ms.CheckpointStore(url, secrets).steps()
    text = "".join(traceback.format_exception(caught.value))
    assert "may not" in text
    assert [s for s in ("anna", "pass", "AKIA", "s3cr3t", "t0ken") if s in text.split("\nmonsess.errors.")[-1]] == []
    assert "AKIAEXAMPLE may not" not in text  # the cause would show it: it is left out


def test_harmless_cause_is_kept():
    with refusing.refusing(refusing.refuse("list")), pytest.raises(ms.StorageError) as caught:
        ms.CheckpointStore("refusing://host/run", {"secret": "s3cr3t-s3cr3t"}).steps()
    assert isinstance(caught.value.__cause__, PermissionError)


def test_password_with_an_at_sign_is_masked_whole():
    assert mask("sftp://anna:p@ss@host/run@3") == "sftp://***@host/run@3"
    assert mask("a sftp://u:p@h/x and b s3://k:s@b/y.") == "a sftp://***@h/x and b s3://***@b/y."


def test_password_with_a_slash_is_masked_whole():
    assert mask("s3://AKIAX:wJalr/K7MDENG@bucket/run") == "s3://***@bucket/run"
    assert mask("s3://AKIAX:/wJalr@bucket/run, s3://AKIAX:1/wJalr@b/y") == "s3://***@bucket/run, s3://***@b/y"
    assert mask("sftp://anna:pa/ss@w0rd@host/run") == "sftp://***@host/run"
    for harmless in ("s3://bucket/run@1", "sftp://host:22/a@b", "sftp://[::1]:22/a@b", "s3://b/x:y@1", "file:///r/a@b"):
        assert mask(harmless) == harmless
    assert {"AKIAX:wJalr", "wJalr", "K7MDENG"} <= set(secrets_of("s3://AKIAX:wJalr/K7MDENG@bucket/run", {}))


@pytest.mark.parametrize("secret", ["-----BEGIN\nabc/def\n--END\n", "it's\\me\"x", "it's m3", 'a"quote', "naïve-ö"])
@pytest.mark.parametrize("around", [str, repr, json.dumps])
def test_secrets_are_masked_as_they_are_written_in_reprs_and_json(secret, around):
    options = {"password": secret, "user": "one", "more": [1, "dog's", '"']}
    for text in (secret, repr(options), json.dumps(options), repr(secret.encode())):
        shown = mask(around(text), secrets_of("s3://bucket/run", options))
        assert "***" in shown
        assert not [part for part in ("abc", "me", "m3", "quote", "na", "ve-") if part in shown], shown


def test_secrets_of_url_and_options():
    found = secrets_of("sftp://anna:p%40ss@host/run", {"secret": "longest-of-all", "anon": False, "region": "eu-west"})
    assert found[0] == "longest-of-all"
    assert {"anna:p%40ss", "anna:p@ss", "p%40ss", "p@ss"} <= set(found)
    assert "eu-west" not in found
