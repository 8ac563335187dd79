"""What every candidate's process would compile alike is compiled once, with a driver's library that holds nothing."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from slime_kernelbench.judge import prepared
from slime_kernelbench.judge.wire import Leaf
from slime_sandbox import Policy, Sandbox

PRELOAD = ("slime_kernelbench.judge.folders", "slime_kernelbench.judge.prepared")
USED = "from triton.backends.nvidia.driver import CudaUtils; print(CudaUtils().load_binary.__name__)"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1: every function that Triton's bridge calls, each of which fails."""
    folder = tmp_path_factory.mktemp("driver")
    folder.chmod(0o755)
    bridge = Path(triton.__file__).parent / "backends" / "nvidia" / "driver.c"
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", bridge.read_text())))
    source = "".join(f"int {name}(void) {{ return 1; }}\n" for name in names)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"]
    subprocess.run(command, input=source.encode(), check=True)
    return folder


def files_of(library: Path) -> dict[str, Leaf]:
    async def ask() -> bytes:
        policy = Policy(
            environment={"LD_LIBRARY_PATH": str(library), "TRITON_LIBCUDA_PATH": str(library)},
            readable=(str(library),),
        )
        async with await Sandbox.open(policy, preload=PRELOAD) as box:
            return (await box.run("slime_kernelbench.judge.prepared:main")).result

    return prepared.parse_answer(asyncio.run(ask()))


def test_tritons_driver_is_compiled_in_the_sandbox_and_needs_no_compiler_afterwards(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(library)
    assert [Path(name).name.partition(".")[0] for name in files] == ["cuda_utils"]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    prepared.put(files)
    environment = os.environ | {"CC": "false", "LD_LIBRARY_PATH": str(library), "TRITON_LIBCUDA_PATH": str(library)}
    shown = subprocess.run([sys.executable, "-c", USED], capture_output=True, text=True, env=environment, check=False)
    assert shown.stdout == "load_binary\n", shown.stderr


def test_processes_are_forked_from_one_that_has_read_triton() -> None:
    source = (
        "import sys; from slime_kernelbench.judge import measured; from triton.runtime.cache import triton_key; "
        "print(triton_key.cache_info().currsize, 'triton.compiler.code_generator' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    shown = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=True)
    assert shown.stdout == "1 True\n"


@pytest.mark.nightly
def test_where_there_is_no_driver_there_is_nothing_to_hand_over(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="message"):
        files_of(tmp_path)
