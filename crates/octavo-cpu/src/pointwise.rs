//! Pointwise functions of the MLP.

use octavo_backend::Activation;

use crate::{
    isa::Isa,
    simd::{LANES, Simd, exp, simd_shells},
};

/// `gate[i] = activation(gate[i]) * up[i]`.
#[derive(Debug, Clone, Copy)]
pub struct GateKernel {
    kernel: unsafe fn(*mut f32, *const f32, usize),
}

impl GateKernel {
    /// The kernel of one instruction set.
    pub fn new(isa: Isa, activation: Activation) -> GateKernel {
        match activation {
            Activation::Silu => GateKernel { kernel: silu_kernel(isa) },
        }
    }

    /// Applies the gate in place.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn apply(&self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len());
        // SAFETY: both have this length and cannot overlap.
        unsafe { (self.kernel)(gate.as_mut_ptr(), up.as_ptr(), gate.len()) }
    }
}

simd_shells! {
    fn silu_kernel[][] = gate_silu(gate: *mut f32, up: *const f32, len: usize);
}

/// # Safety
/// `len` floats at both, which do not overlap.
#[inline(always)]
unsafe fn gate_silu<S: Simd>(simd: S, gate: *mut f32, up: *const f32, len: usize) {
    for at in (0..len).step_by(LANES) {
        let n = LANES.min(len - at);
        // SAFETY: by the contract.
        unsafe {
            let (x, factor) = match n {
                LANES => (simd.load(gate.add(at)), simd.load(up.add(at))),
                _ => (simd.load_first(gate.add(at), n), simd.load_first(up.add(at), n)),
            };
            let one = simd.splat(1.0);
            let denominator = simd.add(one, exp(simd, simd.sub(simd.splat(0.0), x)));
            let value = simd.mul(simd.div(x, denominator), factor);
            match n {
                LANES => simd.store(gate.add(at), value),
                _ => simd.store_first(gate.add(at), n, value),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silu_is_within_a_millionth_of_the_exact_function_and_the_same_everywhere() {
        let inputs: Vec<f32> = (0..1003).map(|i| (i as f32 - 500.0) * 0.21).collect();
        let plain = |isa| {
            let mut gate = inputs.clone();
            GateKernel::new(isa, Activation::Silu).apply(&mut gate, &vec![2.0; inputs.len()]);
            gate
        };
        let expected = plain(Isa::Scalar);
        for isa in Isa::supported() {
            assert_eq!(plain(isa), expected, "{isa}");
        }
        for (input, found) in inputs.iter().zip(&expected) {
            let exact = 2.0 * f64::from(*input) / (1.0 + (-f64::from(*input)).exp());
            assert!((f64::from(*found) - exact).abs() <= 1e-6 * exact.abs() + 1e-30, "{input}: {found} and {exact}");
        }
    }

    #[test]
    fn silu_keeps_faults_visible() {
        for isa in Isa::supported() {
            let mut gate = [f32::NAN, f32::INFINITY, -200.0];
            GateKernel::new(isa, Activation::Silu).apply(&mut gate, &[1.0; 3]);
            assert!(gate[0].is_nan() && gate[1] == f32::INFINITY && gate[2] == 0.0, "{isa}: {gate:?}");
        }
    }
}
