"""Diagnosis for slime: rules that say why a run does not learn, with the evidence and the key to change.

from slime_diagnose import diagnose
for diagnosis in diagnose(Path("runs/demo-0")):
    print(diagnosis.summary, diagnosis.fix)
"""

from slime_diagnose.diagnosis import SEVERITIES as SEVERITIES, Diagnosis as Diagnosis, Severity as Severity
from slime_diagnose.history import History as History
from slime_diagnose.rules import diagnose as diagnose

__version__ = "0.1.0"
