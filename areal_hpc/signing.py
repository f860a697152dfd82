"""The run's secret for sockets whose makers know none: torch, gloo, NCCL, HCCL and ZeroMQ open them by themselves.

Linux signs TCP for who asks it to (RFC 2385, made for routers; no rights are needed): a socket that was given a key
sends each segment with an MD5 of it and the key, and drops, unanswered, what comes without. To whoever lacks the key
nobody listens there, and who has got into the middle of a connection cannot put a byte into it. It hides nothing.

    launcher                                        a process that forms groups, and all that it starts
    provide(attempts/N/signing.so)                  LD_PRELOAD=attempts/N/signing.so
    compiles signing.c, or takes what `submit`
    compiled, or says why it has none               what libtorch, libnccl... listen on or connect gets the key

An attempt's sockets are signed if its directory has the library: every process looks there alone, so that all agree.
What this costs is speed: a signed connection carries some 0.3 GB/s, since CPUs hash its segments one by one. That
concerns NCCL and HCCL over TCP; over InfiniBand, RoCE, Slingshot, NVLink or shared memory their sockets carry first
words only.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from areal_hpc.config.cluster import SignSockets
from areal_hpc.errors import ConfigError
from areal_hpc.fs import names_in, publish
from areal_hpc.privacy import is_own

SOURCE = Path(__file__).with_name("signing.c")
KEY_VARIABLE = "AREAL_HPC_SOCKET_KEY"
"""Names the file of the key, which is in no environment itself."""
MD5SIG_EXT, WITH_PREFIX = 32, 1
"""Of linux/tcp.h."""
SEPARATORS = re.compile(r"[\s:]")
"""What LD_PRELOAD takes for the end of a name."""
COMPILERS = ("cc", "gcc", "clang")
COMPILE_S = 60.0
ADVICE = "set cluster.sign_sockets=never where nobody else reaches the run's network"


def provide(library: Path, choice: SignSockets, spare: Path | None = None) -> str:
    """Make the library of a new attempt, unless its sockets are not to be signed.

    Args:
        spare: one that was made before, on a login node say, for a machine that has no compiler; need not be there.

    Returns:
        Why they are not signed though they might have been; empty otherwise.

    Raises:
        ConfigError: they cannot be, and are to be always.
    """
    if choice is SignSockets.NEVER:
        return ""
    if problem := _obstacle(library) or _make(library, spare):
        if choice is SignSockets.ALWAYS:
            raise ConfigError(f"cluster.sign_sockets=always: {problem}; mend that, or {ADVICE}")
        return problem
    return ""


def signing_variables(library: Path, token: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What a process has in its environment whose sockets are to be signed; nothing where the attempt's are not.

    Args:
        token: file of the key.
        environment: what it has otherwise.
    """
    if library.name not in names_in(library.parent):
        return {}
    before = environment.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{library}:{before}" if before else str(library), KEY_VARIABLE: str(token)}


def require_signing(environment: Mapping[str, str] = os.environ) -> None:
    """See that the sockets of this process are signed, if they are to be.

    Raises:
        ConfigError: the library was not loaded, or this kernel signs nothing: nobody would hear this process.
    """
    if KEY_VARIABLE not in environment:
        return
    problem = kernel_problem() or ("" if _is_loaded() else "its libc has not loaded what LD_PRELOAD names")
    if problem:
        raise ConfigError(
            f"the sockets of this run are signed, and {socket.gethostname()} cannot do that: {problem}; leave that "
            f"machine out, or {ADVICE}"
        )


def kernel_problem() -> str:
    """Why this machine's kernel signs no connection; empty if it does."""
    peers = struct.pack("=H126x", socket.AF_INET)
    signature = peers + struct.pack("=BBHI80s", WITH_PREFIX, 0, 1, 0, b"k")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, MD5SIG_EXT, signature)
        except OSError as error:  # built without CONFIG_TCP_MD5SIG, or in a mode (FIPS) that has no MD5
            return f"Linux does not sign TCP connections here ({error.strerror})"
    return ""


def _obstacle(library: Path) -> str:
    if found := SEPARATORS.search(str(library)):
        return f"{library} has {found[0]!r} in its path, where LD_PRELOAD ends a name"
    return kernel_problem()


def _make(library: Path, spare: Path | None) -> str:
    """Make ``library``, if it can be loaded; else why not."""
    if problem := _compile(library):
        if spare is None or not spare.is_file() or not is_own(spare):
            return problem
        publish(library, spare.read_bytes(), secret=True)
    try:
        ctypes.CDLL(str(library))
    except OSError as error:  # a file system that is mounted noexec, or a spare one of another kind of machine
        library.unlink()
        return f"it cannot be loaded from the run directory: {error}"
    return ""


def _compile(library: Path) -> str:
    """Compile ``library``, or say why not. In a directory of its own, which may be on a faster disk."""
    words = shlex.split(os.environ.get("CC", "")) or [name for name in COMPILERS if shutil.which(name)][:1]
    if not words:
        return f"there is no C compiler ({', '.join(COMPILERS)}, or what CC names)"
    with tempfile.TemporaryDirectory(prefix="areal-hpc-") as scratch:
        made = Path(scratch) / library.name
        command = [*words, "-shared", "-fPIC", "-O2", "-o", str(made), str(SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)  # noqa: S603
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{words[0]} does not work: {error}"
        if done.returncode:
            return f"{words[0]} does not compile {SOURCE.name}: {done.stderr.strip()[-300:]}"
        publish(library, made.read_bytes(), secret=True)
    return ""


def _is_loaded() -> bool:
    """Whether this process was started with the library."""
    try:
        ctypes.c_char.in_dll(ctypes.CDLL(None), "areal_hpc_signs")
    except ValueError:
        return False
    return True
