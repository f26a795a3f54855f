//! Rotary position embedding: the step's angles, and the rotation of one head.

use octavo_backend::{DecoderSpec, RopeSpec};

use crate::work::{Place, WorkLayout, WorkMemory};

/// Cosines and sines of a step's rows for one [`RopeSpec`], shared by all layers that have it.
#[derive(Debug, Clone)]
pub struct RopeAngles {
    spec: RopeSpec,
    /// `[rows, pairs]`.
    cosines: Place<f32>,
    sines: Place<f32>,
}

impl RopeAngles {
    /// One entry for each distinct rope of the decoder, and the entry of each layer.
    pub fn of(spec: &DecoderSpec, layout: &mut WorkLayout, max_rows: usize) -> (Vec<RopeAngles>, Vec<usize>) {
        let mut angles: Vec<RopeAngles> = Vec::new();
        let mut of_layers = Vec::with_capacity(spec.layers.len());
        for layer in &spec.layers {
            let rope = &layer.attention.rope;
            let known = angles.iter().position(|angles| angles.spec == *rope);
            of_layers.push(known.unwrap_or(angles.len()));
            if known.is_none() {
                let elements = max_rows * rope.inverse_frequencies.len();
                let (cosines, sines) = (layout.place(elements), layout.place(elements));
                angles.push(RopeAngles { spec: rope.clone(), cosines, sines });
            }
        }
        (angles, of_layers)
    }

    fn pairs(&self) -> usize {
        self.spec.inverse_frequencies.len()
    }

    /// Computes the angles of one row.
    ///
    /// # Safety
    /// No other thread uses this row's angles.
    pub unsafe fn compute(&self, memory: &WorkMemory, row: usize, position: usize) {
        let range = row * self.pairs()..(row + 1) * self.pairs();
        // SAFETY: by the contract.
        let (cosines, sines) = unsafe { (memory.write(self.cosines, range.clone()), memory.write(self.sines, range)) };
        self.spec.angles(position, cosines, sines);
    }

    /// The cosines and sines of one row.
    ///
    /// # Safety
    /// Nobody writes this row's angles.
    pub unsafe fn of_row<'a>(&self, memory: &'a WorkMemory, row: usize) -> (&'a [f32], &'a [f32]) {
        let range = row * self.pairs()..(row + 1) * self.pairs();
        // SAFETY: by the contract.
        unsafe { (memory.read(self.cosines, range.clone()), memory.read(self.sines, range)) }
    }
}
