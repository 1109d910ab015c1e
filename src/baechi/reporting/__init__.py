"""Reports of a placement: text, a page for the browser, a trace for Perfetto.

Everything is computed from values that a file can hold, so that a report can be made on a machine
that has neither torch nor the model.
"""

from baechi.problem.simulation import memory_profile as memory_profile
from baechi.reporting.facts import DeviceFacts as DeviceFacts
from baechi.reporting.facts import device_facts as device_facts
from baechi.reporting.facts import error_text as error_text
from baechi.reporting.html_page import write_html as write_html
from baechi.reporting.perfetto import trace_events as trace_events
from baechi.reporting.perfetto import write_trace as write_trace
from baechi.reporting.text import text_report as text_report
