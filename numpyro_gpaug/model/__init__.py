# SPDX-License-Identifier: Apache-2.0
"""A user's model as the rest of the package sees it.

Its structure, found by tracing it and reading its jaxpr; views of it at given params;
and whether what was passed in is what it may be.
"""
