"""The report of a check: what holds, and what is not supported and why.

Face, below the checks of ``blufunc.testing``.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a check that found nothing wrong.

    Attributes:
      subject: what was checked.
      checked: what holds: the name of each check, and what it compared.
      unsupported: what was not checked because it is declared not to exist, and the reason.
    """

    subject: str
    checked: dict[str, str] = dataclasses.field(default_factory=dict)
    unsupported: dict[str, str] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        width = max(map(len, [*self.checked, *self.unsupported]), default=0)
        lines = [f"{self.subject}: {len(self.checked)} checks passed, {len(self.unsupported)} not supported"]
        lines += [f"  {name:<{width}}  {text}" for name, text in self.checked.items()]
        lines += [f"  {name:<{width}}  not supported: {text}" for name, text in self.unsupported.items()]
        return "\n".join(lines)
