"""The peers that bring kernels of their own: quack, DeepGEMM, the operators library, and a gemmcache bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmcache._version import __version__
from gemmcache.epilogue import Epilogue
from gemmcache.problem import Problem
from gemmcache.records.interface import OK as TRIAL_OK
from gemmcache.records.interface import Trial, TuningRecord
from tools.peers.interface import Call, Inputs, Peer, PeerError

if TYPE_CHECKING:
    from torch import Tensor

#: The names that quack gives our activations and gates; its geglu is another function than ours.
_QUACK_ACTIVATIONS = {"relu": "relu", "silu": "silu", "gelu_tanh": "gelu_tanh_approx"}
_QUACK_GATES = {"swiglu": "swiglu"}


class Quack(Peer):
    """quack's own autotuned interface, on weights as torch stores them."""

    name = "quack"
    packages = ("quack-kernels",)

    def available(self) -> str | None:
        missing = [name for name in ("quack", "triton") if find_spec(name) is None]
        return f"not installed: {', '.join(missing)}" if missing else None

    def uncovered(self, problem: Problem) -> str | None:
        family, epilogue = problem.family, problem.family.epilogue
        if epilogue.scale or family.a_dtype not in ("bfloat16", "float16") or family.b_dtype != family.a_dtype:
            return "16-bit operands without scales only"
        if epilogue.activation and epilogue.activation not in _QUACK_ACTIVATIONS:
            return f"no {epilogue.activation}"
        if epilogue.gate and epilogue.gate not in _QUACK_GATES:
            return f"its {epilogue.gate} is another function"
        if epilogue.residual and (epilogue.activation or epilogue.gate):
            return "adds a residual before the activation only"
        return None

    def prepare(self, problem: Problem, inputs: Sequence[Inputs]) -> Call:
        from quack import gemm_interface as quack

        e = problem.family.epilogue
        if e.gate:
            gemm_gated, gate = quack.gemm_gated, _QUACK_GATES[e.gate]
            # The weight holds both halves one after the other.
            halves = ("B", "bias") if e.bias else ("B",)
            return lambda i: gemm_gated(
                i.a,
                i.b.t(),
                bias=i.operands.get("bias"),
                activation=gate,
                postact_out=i.out,
                store_preact=False,
                concat_layout=halves,
            )[1]
        if e.activation:
            gemm_act, activation = quack.gemm_act, _QUACK_ACTIVATIONS[e.activation]
            return lambda i: gemm_act(
                i.a,
                i.b.t(),
                bias=i.operands.get("bias"),
                activation=activation,
                postact_out=i.out,
                store_preact=False,
            )[1]
        if e.residual:
            gemm_add, beta = quack.gemm_add, float(e.beta)
            return lambda i: gemm_add(
                i.a, i.b.t(), i.operands["residual"], out=i.out, bias=i.operands.get("bias"), beta=beta
            )
        gemm = quack.gemm
        return lambda i: gemm(i.a, i.b.t(), out=i.out, bias=i.operands.get("bias"))


class QuackInterleaved(Quack):
    """quack's gated product on weights whose halves were interleaved row by row beforehand, as it likes them."""

    name = "quack-interleaved"

    def uncovered(self, problem: Problem) -> str | None:
        return super().uncovered(problem) if problem.family.epilogue.gate else "the same as quack"

    def prepare(self, problem: Problem, inputs: Sequence[Inputs]) -> Call:
        from quack.gemm_interface import gemm_gated

        gate = _QUACK_GATES[str(problem.family.epilogue.gate)]

        def interleaved(rows: Tensor) -> Tensor:
            return rows.view(2, rows.shape[0] // 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

        weights = {i.b.data_ptr(): interleaved(i.b).t() for i in inputs}
        biases = {t.data_ptr(): interleaved(t) for i in inputs if (t := i.operands.get("bias")) is not None}

        def call(i: Inputs) -> Tensor:
            bias = biases[i.operands["bias"].data_ptr()] if biases else None
            found = gemm_gated(
                i.a, weights[i.b.data_ptr()], bias=bias, activation=gate, postact_out=i.out, store_preact=False
            )
            result: Tensor = found[1]
            return result

        return call


class DeepGemm(Peer):
    """DeepGEMM's bf16 product, and its fp8 one, whose scales are of blocks: torch multiplies by those of columns."""

    name = "deepgemm"
    packages = ("sgl-deep-gemm", "deep-gemm")

    def available(self) -> str | None:
        return None if find_spec("deep_gemm") else "not installed: deep_gemm"

    def uncovered(self, problem: Problem) -> str | None:
        family = problem.family
        if family.out_dtype == "bfloat16":
            if family.a_dtype == family.b_dtype == "bfloat16" and not family.epilogue:
                return None
            if family.a_dtype == family.b_dtype == "float8_e4m3fn" and family.epilogue == Epilogue(scale="row_column"):
                return "its blocks of scales need k and n in multiples of 128" if (family.k | family.n) % 128 else None
        return "bf16 without epilogue, or e4m3 with scales of rows and columns, only"

    def prepare(self, problem: Problem, inputs: Sequence[Inputs]) -> Call:
        deep_gemm = import_module("deep_gemm")

        if problem.family.a_dtype == "bfloat16":
            bf16 = deep_gemm.bf16_gemm_nt

            def plain(i: Inputs) -> Tensor:
                bf16(i.a, i.b, i.out)
                return i.out

            return plain
        product = self._block_scaled(deep_gemm, inputs)

        def scaled(i: Inputs) -> Tensor:
            return product(i).mul_(i.operands["scale_b"])

        return scaled

    @staticmethod
    def _block_scaled(deep_gemm: Any, inputs: Sequence[Inputs]) -> Call:
        """The product with a's scales, which its layout holds once for every 128 columns, and ones for b."""
        import torch

        fp8 = deep_gemm.fp8_gemm_nt
        scales = {}
        for i in inputs:
            (n, k), device = i.b.shape, i.b.device
            rows = i.operands["scale_a"].expand(-1, k // 128).contiguous()
            # What the layer before would write; made here once, not in every call.
            aligned = deep_gemm.get_mn_major_tma_aligned_tensor(rows)
            scales[i.a.data_ptr()] = aligned, torch.ones(n // 128, k // 128, device=device)

        def call(i: Inputs) -> Tensor:
            scale_a, scale_b = scales[i.a.data_ptr()]
            fp8((i.a, scale_a), (i.b, scale_b), i.out)
            return i.out

        return call


class DeepGemmBlock(DeepGemm):
    """DeepGEMM's fp8 product alone: block scales are its own problem, without those of the columns."""

    name = "deepgemm-block"
    ranked = False

    def uncovered(self, problem: Problem) -> str | None:
        scaled = bool(problem.family.epilogue.scale)
        return super().uncovered(problem) if scaled else "the same as deepgemm"

    def prepare(self, problem: Problem, inputs: Sequence[Inputs]) -> Call:
        deep_gemm = import_module("deep_gemm")

        return self._block_scaled(deep_gemm, inputs)

    def comparable(self, problem: Problem, result: Tensor, inputs: Inputs) -> Tensor:
        return result.float() * inputs.operands["scale_b"]

    def note(self, problem: Problem) -> str:
        return "block scales, none of columns: another problem"


class Operators(Peer):
    """The best config of the operators library that `records` name for a problem, compiled and timed here."""

    name = "operators"
    packages = ("nvidia-cutlass-operators",)

    def __init__(self, records: Iterable[TuningRecord] | None) -> None:
        self.given = records is not None
        self.best: dict[Problem, tuple[float, Trial]] = {}
        for record in records or ():
            for trial in record.trials:
                ratio = trial.us / record.library_us
                if trial.config.kernel_family != self.name or trial.status != TRIAL_OK:
                    continue
                if record.problem not in self.best or ratio < self.best[record.problem][0]:
                    self.best[record.problem] = ratio, trial

    def available(self) -> str | None:
        return None if self.given else "no --records to take its configs from"

    def uncovered(self, problem: Problem) -> str | None:
        return None if problem in self.best else "no trial of it in the records"

    def note(self, problem: Problem) -> str:
        ratio, trial = self.best[problem]
        return f"{trial.config}, {1 / ratio:.3f} x cuBLAS in the records"

    def prepare(self, problem: Problem, inputs: Sequence[Inputs]) -> Call:
        from gemmcache.build.compile import compile_kernels
        from gemmcache.build.link import link
        from gemmcache.build.objects import ObjectCache
        from gemmcache.bundle import memory
        from gemmcache.bundle.interface import function_name
        from gemmcache.codec import bytes_digest
        from gemmcache.environment import CUDA_MAJOR
        from gemmcache.kernels.identity import detect_toolchain, kernel_digest
        from gemmcache.kernels.registry import kernel_families, kernel_family
        from gemmcache.runtime.native import load_module
        from gemmcache.target import detect_host, detect_target

        family = problem.family
        spec = kernel_family(self.name).spec(self.best[problem][1].config, family, detect_target(_index(inputs)))
        digest = kernel_digest(spec, detect_toolchain(kernel_families().values()), detect_host())
        with tempfile.TemporaryDirectory(prefix="gemmcache-peers-") as folder:
            objects, errors = compile_kernels({digest: spec}, ObjectCache(Path(folder)), jobs=1)
        if errors:
            raise errors[digest]
        blob = link(objects)
        module = load_module(bytes_digest(blob), lambda: memory.sealed_copy([blob], len(blob)), CUDA_MAJOR)
        function, names = module.function(function_name(digest)), family.epilogue.operands()

        def call(i: Inputs) -> Tensor:
            # The kernels' scales are vectors.
            flat = (t.flatten() if name.startswith("scale") else t for name in names for t in [i.operands[name]])
            function(i.a, i.b, i.out, *flat)
            return i.out

        return call


def _index(inputs: Sequence[Inputs]) -> int:
    index = inputs[0].a.device.index
    if index is None:
        raise PeerError("its kernels run on a CUDA device only")
    return int(index)


class Gemmcache(Peer):
    """`bundle.linear` of a loaded bundle, called as a model would."""

    name = "gemmcache"

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.bundle: Any = None

    def version(self) -> str:
        # Of a checkout that is not installed too.
        return __version__

    def available(self) -> str | None:
        return None if self.path else "no bundle given"

    def uncovered(self, problem: Problem) -> str | None:
        beta = problem.family.epilogue.beta
        return None if beta == "1" else f"bundle.linear has no residual factor ({beta})"

    def prepare(self, problem: Problem, inputs: Sequence[Inputs]) -> Call:
        if self.bundle is None:
            import gemmcache

            if self.path is None:
                raise PeerError("no bundle given")
            self.bundle = gemmcache.load(self.path)
        linear, family = self.bundle.linear, problem.family
        epilogue = family.epilogue
        if not epilogue and family.out_dtype == family.a_dtype:
            return lambda i: linear(i.a, i.b)
        fixed: dict[str, Any] = {"activation": epilogue.activation} if epilogue.activation else {}
        if epilogue.gate:
            fixed["gate"] = epilogue.gate
        if family.out_dtype != family.a_dtype:
            import torch

            fixed["out_dtype"] = getattr(torch, family.out_dtype)
        return lambda i: linear(i.a, i.b, **i.operands, **fixed)

    def note(self, problem: Problem) -> str:
        """What serves the problem: a kernel, or the library, by choice or for want of an entry."""
        dispatcher = self.bundle.dispatchers.get(problem.family)
        if dispatcher is None:
            return "library: family not in the bundle"
        choice = dispatcher.choose(problem.m)
        if choice.function is not None:
            return "kernel"
        return "library" if choice.entry is not None else f"library: m {choice.where} the tuned ones"
