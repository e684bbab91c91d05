"""A gate for continuous integration: rules over what was compared, judged one by one."""

from diffcheck.gate.junit import junit
from diffcheck.gate.rules import Rules, Ruling, exit_code, judge
from diffcheck.gate.subject import Subject, read_subject

__all__ = ["Rules", "Ruling", "Subject", "exit_code", "judge", "junit", "read_subject"]
