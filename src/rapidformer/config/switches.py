"""Every change that the library makes, as one row each, in the order of application.

Everything that needs only facts about a switch reads them here; ``accel/parallelize.py`` walks the
same rows and calls each module. A new switch is a field in ``sections.py``, a row in ``rows/``, a
module in ``accel/`` and a parity test. A setting without a row fails a test.
"""

from __future__ import annotations

from rapidformer.config.row import Implication, Rule, Situation, Switch, get_switch
from rapidformer.config.rows.final import FINAL
from rapidformer.config.rows.placed import PLACED
from rapidformer.config.rows.whole import WHOLE
from rapidformer.config.schema import to_flag

__all__ = ["SWITCHES", "Implication", "Rule", "Situation", "Switch", "get_switch", "to_flag"]

SWITCHES: tuple[Switch, ...] = (*WHOLE, *PLACED, *FINAL)
