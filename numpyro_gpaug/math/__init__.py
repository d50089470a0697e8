# SPDX-License-Identifier: Apache-2.0
"""Special functions, quadrature and linear algebra, independent of any model."""
