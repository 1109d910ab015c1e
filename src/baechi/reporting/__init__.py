"""Reports of a placement: text, a page for the browser, a trace for Perfetto.

Everything is computed from values that a file can hold, without torch and the model.
"""

from baechi.reporting.facts import Plan as Plan
from baechi.reporting.facts import error_text as error_text
from baechi.reporting.perfetto import write_trace as write_trace
from baechi.reporting.reports import text_report as text_report
from baechi.reporting.reports import write_html as write_html
