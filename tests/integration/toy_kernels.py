"""An out-of-tree kernel family, copied into a folder of its own by the tests: float32 problems, objects made by gcc.

What it does on the way is told by the environment: TOY_LOG names a file that gets a line `tile pid` for each kernel
compiled; TOY_TILE_<n>=abort|exit|raise|unpicklable|wrong-name|nothing makes the kernel of that tile fail so;
TOY_SECONDS is how long each takes.
"""

import hashlib
import os
import subprocess
import tempfile
import time
from pathlib import Path

from gemmcache.bundle.interface import symbol_name
from gemmcache.errors import UnsupportedError
from gemmcache.kernels.interface import Config, KernelFamily, KernelSpec

TILES = (16, 32, 64, 128)


class ToyFamily(KernelFamily):
    name = "toy"

    def source_digest(self):
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def unsupported(self, family, target):
        return None if family.a_dtype == family.b_dtype == "float32" and not family.epilogue else "only plain float32"

    def configs(self, family, target):
        if self.unsupported(family, target) is None:
            for tile in TILES:
                yield Config.of("toy", tile=tile)

    def spec(self, config, family, target):
        if config not in list(self.configs(family, target)):
            raise UnsupportedError(f"{config} is not in the space of 'toy'")
        return KernelSpec.for_family(config, family, target.arch, None)

    def estimate_us(self, config, problem, target):
        tile = int(config["tile"])
        return 1.0 + abs(min(problem.m, TILES[-1]) - tile) / 100

    def compile(self, spec, function_name):
        tile = spec.config["tile"]
        if "TOY_LOG" in os.environ:
            with open(os.environ["TOY_LOG"], "a") as log:
                log.write(f"{tile} {os.getpid()}\n")
        time.sleep(float(os.environ.get("TOY_SECONDS", "0")))
        fault = os.environ.get(f"TOY_TILE_{tile}")
        if fault == "abort":
            os.abort()
        if fault == "exit":
            os._exit(0)
        if fault == "raise":
            raise KeyError("no such thing")
        if fault == "unpicklable":
            error = RuntimeError("holds a lock")
            error.lock = __import__("threading").Lock()
            raise error
        if fault == "nothing":
            return None
        symbol = "func" if fault == "wrong-name" else symbol_name(function_name)
        source = f"int {symbol}(void) {{ return {tile}; }}\n"
        with tempfile.TemporaryDirectory() as folder:
            command = ["gcc", "-x", "c", "-c", "-fPIC", "-O1", "-o", f"{folder}/x.o", "-"]
            subprocess.run(command, input=source.encode(), capture_output=True, check=True)
            return Path(folder, "x.o").read_bytes()
