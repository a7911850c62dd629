"""The audit: no output depends on input that has not arrived (method.md §7, Theorem 1, Corollary 1).

The audit takes any model, trained or not. It replaces everything beyond a horizon by other values, by NaN, by nothing and by more. What
was written up to that horizon must be equal to the bit. Where a replacement changes the shape of a padded batch, sums are added in
another order; only there the comparison is in float64, to one part in 10⁹.
"""

from zendaya.audit.model import audit as audit
from zendaya.audit.model import default_schedules as default_schedules
from zendaya.audit.report import AuditReport as AuditReport
