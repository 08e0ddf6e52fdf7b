"""Barycenters: entropic ones of histograms, plain and debiased, and free ones of clouds.

barycenter      the public function, and which method runs when: the plain iteration first, Newton's method where
                that is slow, and the iteration again where Newton's method fails
problem         the problem, the potentials, the result, and the thresholds of all methods
iteration       the plain iteration with extrapolation; its error is what its cycles change
equations       the linear equations of a Newton step, which have three users:
debiased_error      the error of a debiased barycenter, which slow changes do not hide from
newton              Newton's method for debiased barycenters
gradient            the derivatives
ascent          Newton's method on the dual of plain barycenters, by the kernel `ascent_numba`
clouds, masses  barycenters of clouds with free points: another problem, without equations of the others
"""
