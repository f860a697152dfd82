"""What signs sockets: where it can be had, and who is given it. That it works is seen in tests/integration."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from signed import library_in

from areal_hpc import signing
from areal_hpc.config.cluster import SignSockets
from areal_hpc.errors import ConfigError
from areal_hpc.signing import KEY_VARIABLE, kernel_problem, provide, require_signing, signing_variables

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library_in(tmp_path_factory.mktemp("attempt"))


def key_in(directory: Path, key: str) -> Path:
    path = directory / key
    path.write_text(key, encoding="ascii")
    return path


def test_processes_are_told_where_the_key_is_and_not_the_key(library: Path, tmp_path: Path) -> None:
    token = key_in(tmp_path, "secret")
    assert signing_variables(library, token, {}) == {"LD_PRELOAD": str(library), KEY_VARIABLE: str(token)}
    assert signing_variables(library, token, {"LD_PRELOAD": "/a.so"})["LD_PRELOAD"] == f"{library}:/a.so"
    assert signing_variables(tmp_path / "signing.so", token, {}) == {}, "an attempt that is not signed"
    assert library.stat().st_mode & 0o777 == 0o600


def test_a_process_into_which_it_was_not_loaded_is_refused(library: Path, tmp_path: Path) -> None:
    variables = signing_variables(library, key_in(tmp_path, "key"), {})
    require_signing({})
    with pytest.raises(ConfigError, match="has not loaded what LD_PRELOAD names; leave that machine out, or set"):
        require_signing(variables)
    checked = [sys.executable, "-c", "from areal_hpc.signing import require_signing; require_signing()"]
    subprocess.run(checked, env={**os.environ, **variables}, check=True, timeout=LIMIT_S)


def test_never_makes_nothing(tmp_path: Path) -> None:
    assert provide(tmp_path / "signing.so", SignSockets.NEVER) == ""
    assert list(tmp_path.iterdir()) == []


def assert_not_provided(library: Path, why: str) -> None:
    assert why in provide(library, SignSockets.AUTO)
    with pytest.raises(
        ConfigError, match=r"^cluster\.sign_sockets=always: .*; mend that, or set cluster\.sign"
    ) as told:
        provide(library, SignSockets.ALWAYS)
    assert why in str(told.value)
    assert not library.exists()


def test_a_machine_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert_not_provided(tmp_path / "signing.so", "there is no C compiler (cc, gcc, clang, or what CC names)")


def test_a_node_without_a_compiler_takes_what_was_made_where_there_is_one(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/none")
    assert "/none does not work" in provide(tmp_path / "signing.so", SignSockets.AUTO, tmp_path / "spare.so")
    assert provide(tmp_path / "signing.so", SignSockets.ALWAYS, library) == ""
    assert (tmp_path / "signing.so").read_bytes() == library.read_bytes()
    assert (tmp_path / "signing.so").stat().st_mode & 0o777 == 0o600
    (tmp_path / "spare.so").write_bytes(b"of another machine")
    assert "cannot be loaded" in provide(tmp_path / "other.so", SignSockets.AUTO, tmp_path / "spare.so")


@pytest.mark.parametrize(("compiler", "why"), [("false", "false does not compile signing.c"), ("/none", "not work")])
def test_a_compiler_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, why: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert_not_provided(tmp_path / "signing.so", why)


@pytest.mark.parametrize("name", ["my run", "a:b"])
def test_a_path_that_a_preload_cannot_have(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert_not_provided(tmp_path / name / "signing.so", "in its path, where LD_PRELOAD ends a name")


def test_a_library_that_cannot_be_loaded_from_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler whose output is none stands for a file system that is mounted noexec."""
    (tmp_path / "cc").write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho none > "$2"\n')
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    assert_not_provided(tmp_path / "signing.so", "cannot be loaded from the run directory")


def test_a_kernel_that_does_not_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that no kernel knows stands for one that was built without."""
    assert kernel_problem() == ""
    monkeypatch.setattr(signing, "MD5SIG_EXT", 9999)
    assert kernel_problem() == "Linux does not sign TCP connections here (Protocol not available)"
    assert_not_provided(tmp_path / "signing.so", "Linux does not sign TCP connections here")
    with pytest.raises(ConfigError, match=f"and {socket.gethostname()} cannot do that: Linux does not sign"):
        require_signing({KEY_VARIABLE: "/key"})
