"""``scipy.linalg``: factorizations, solvers, functions and special matrices.

A face above ``bnp.linalg`` and ``lax.linalg``.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.scipy.linalg.functions import expm as expm
    from blufunc.scipy.linalg.functions import expm_frechet as expm_frechet
    from blufunc.scipy.linalg.functions import funm as funm
    from blufunc.scipy.linalg.functions import solve_sylvester as solve_sylvester
    from blufunc.scipy.linalg.functions import sqrtm as sqrtm
    from blufunc.scipy.linalg.matrices import block_diag as block_diag
    from blufunc.scipy.linalg.matrices import circulant as circulant
    from blufunc.scipy.linalg.matrices import companion as companion
    from blufunc.scipy.linalg.matrices import convolution_matrix as convolution_matrix
    from blufunc.scipy.linalg.matrices import dft as dft
    from blufunc.scipy.linalg.matrices import fiedler as fiedler
    from blufunc.scipy.linalg.matrices import fiedler_companion as fiedler_companion
    from blufunc.scipy.linalg.matrices import hadamard as hadamard
    from blufunc.scipy.linalg.matrices import hankel as hankel
    from blufunc.scipy.linalg.matrices import helmert as helmert
    from blufunc.scipy.linalg.matrices import hilbert as hilbert
    from blufunc.scipy.linalg.matrices import invhilbert as invhilbert
    from blufunc.scipy.linalg.matrices import invpascal as invpascal
    from blufunc.scipy.linalg.matrices import leslie as leslie
    from blufunc.scipy.linalg.matrices import pascal as pascal
    from blufunc.scipy.linalg.matrices import toeplitz as toeplitz
    from blufunc.scipy.linalg.reductions import eigh_tridiagonal as eigh_tridiagonal
    from blufunc.scipy.linalg.reductions import hessenberg as hessenberg
    from blufunc.scipy.linalg.reductions import rsf2csf as rsf2csf
    from blufunc.scipy.linalg.reductions import schur as schur
    from blufunc.scipy.linalg.systems import cho_factor as cho_factor
    from blufunc.scipy.linalg.systems import cho_solve as cho_solve
    from blufunc.scipy.linalg.systems import cholesky as cholesky
    from blufunc.scipy.linalg.systems import det as det
    from blufunc.scipy.linalg.systems import eigh as eigh
    from blufunc.scipy.linalg.systems import inv as inv
    from blufunc.scipy.linalg.systems import lu as lu
    from blufunc.scipy.linalg.systems import lu_factor as lu_factor
    from blufunc.scipy.linalg.systems import lu_solve as lu_solve
    from blufunc.scipy.linalg.systems import polar as polar
    from blufunc.scipy.linalg.systems import qr as qr
    from blufunc.scipy.linalg.systems import qr_multiply as qr_multiply
    from blufunc.scipy.linalg.systems import solve as solve
    from blufunc.scipy.linalg.systems import solve_triangular as solve_triangular
    from blufunc.scipy.linalg.systems import svd as svd
