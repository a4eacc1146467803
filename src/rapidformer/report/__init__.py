"""The page of a run, or of several: one HTML file with everything that the run folders know.

``metrics`` and ``run`` read, ``page`` writes, ``live`` serves it while a run goes on. The page
itself is in ``assets``: it draws what it finds in one block of JSON, and needs no network.
"""

PAGE_FILE = "report.html"
