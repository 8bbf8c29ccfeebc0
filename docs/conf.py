# SPDX-License-Identifier: Apache-2.0
"""The site of the documentation: ``make docs`` builds it into build/docs; warnings are errors."""

project = "wavemare"
html_title = "wavemare"
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
extensions = ["myst_parser"]
exclude_patterns = ["cluster"]
# Headings have the anchors that code hosts give them, so that links lead on there and here.
myst_heading_anchors = 4
# Keys of the configuration have anchors in HTML, which MyST does not know. tests/unit/test_docs.py
# checks all links.
suppress_warnings = ["myst.xref_missing"]
nitpicky = True
