"""The result of `breccia.explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import targets

if TYPE_CHECKING:
    from .kernel import Kernel


@dataclass(frozen=True)
class Verdict:
    """One candidate of a call: why it was skipped, or None for the winner."""

    kernel: Kernel
    reason: str | None

    @property
    def location(self) -> str:
        """`file:line` of the kernel's definition."""
        return targets.locate(self.kernel.target)


@dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `breccia.explain`: print it, or read its fields.

    tied: the best kernels, if their ranks are equal. device: the kind of device, if it was given by name.
    plan: the winner's calls of other kernels, explained in the same way.
    """

    call: str
    framework: str
    verdicts: tuple[Verdict, ...]
    tied: tuple[Kernel, ...] = ()
    device: str = ""
    plan: tuple[Explanation, ...] = ()

    @property
    def winner(self) -> Kernel | None:
        return next((v.kernel for v in self.verdicts if v.reason is None), None)

    @property
    def fault(self) -> str:
        """Why the call fails, and the remedies; empty if a kernel runs."""
        if self.tied:
            a, b = self.tied[:2]
            return (
                f"Kernels {a.name!r} ({a.plugin}) and {b.name!r} ({b.plugin}) rank the same. Name one with prefer=, or set one "
                f"plug-in aside with BRECCIA_BLOCK={b.plugin}."
            )
        if self.winner is None:
            return "No kernel runs for this call. `breccia plugins` shows what is installed and what was set aside."
        return ""

    @property
    def running(self) -> str:
        """The winner's name, and in parentheses the names of the kernels it calls."""
        if self.winner is None:
            return ""
        inner = ", ".join(step.running for step in self.plan)
        return self.winner.name + (f" ({inner})" if inner else "")

    def _calls(self, indent: str) -> list[str]:
        """A line for each call of the plan, followed by its own plan."""
        lines: list[str] = []
        for step in self.plan:
            where = next((f" {v.location}" for v in step.verdicts if v.reason is None), "")
            lines.append(
                f"{indent}calls {step.call} on {step.framework}: {step.winner.name if step.winner else step.fault}{where}"
            )
            lines += step._calls(indent + "  ")
        return lines

    def __str__(self) -> str:
        lines = [f"{self.call} on {self.framework}{self.device and ':' + self.device}"]
        width = max((len(v.kernel.name) for v in self.verdicts), default=0)
        for v in self.verdicts:
            arrow = " -> " if v.reason is None else "    "
            lines.append(f"{arrow}{v.kernel.name:{width}}  {v.kernel.plugin:10} {v.location}")
            if v.reason is not None:
                lines.append(f"      skipped: {v.reason}")
            if v.reason is None:
                lines += self._calls("      ")
        if self.fault:
            lines.append(f"  {self.fault}")
        return "\n".join(lines)

    __repr__ = __str__
