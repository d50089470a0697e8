# SPDX-License-Identifier: Apache-2.0
"""Special functions, quadrature and linear algebra; knows of no model."""
