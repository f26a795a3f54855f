//! Matrix products of bfloat16 with sums in 32-bit floats, for every output in one order.

/// A product as cuBLASLt is asked for it: `output[row] = factor * weights input[row] + keep * output[row]`.
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// Device address of `[outputs, weight_stride]` bfloat16.
    pub weights: u64,
    /// Device address of `[rows, input_stride]` bfloat16.
    pub input: u64,
    /// Device address of `[rows, output_stride]` floats.
    pub output: u64,
    /// Rows of the weights.
    pub outputs: usize,
    /// Columns of the weights.
    pub inputs: usize,
    /// Rows of the input.
    pub rows: usize,
    /// From one row of the weights to the next.
    pub weight_stride: usize,
    /// From one row of the input to the next.
    pub input_stride: usize,
    /// From one row of the output to the next.
    pub output_stride: usize,
    /// On every sum.
    pub factor: f32,
}

/// Multiplications from which on it pays to use all processors.
const WORTH_THREADS: usize = 1 << 21;

/// Sums that are added up side by side.
const LANES: usize = 16;

impl Product {
    /// Bytes of the weights, of the input, of the output.
    pub fn bytes(&self) -> [usize; 3] {
        let extent = |rows: usize, stride: usize, columns: usize| if rows == 0 { 0 } else { (rows - 1) * stride + columns };
        [
            2 * extent(self.outputs, self.weight_stride, self.inputs),
            2 * extent(self.rows, self.input_stride, self.inputs),
            4 * extent(self.rows, self.output_stride, self.outputs),
        ]
    }

    /// `[outputs, rows]` sums, of the bytes of weights and input.
    pub fn run(&self, weights: &[u8], input: &[u8]) -> Vec<f32> {
        let rows: Vec<Vec<f32>> = (0..self.rows)
            .map(|row| {
                let mut values = vec![0.0; self.inputs];
                widen(&input[2 * row * self.input_stride..], &mut values);
                values
            })
            .collect();
        let mut sums = vec![0.0; self.outputs * self.rows];
        let threads = match self.outputs * self.inputs * self.rows {
            work if work < WORTH_THREADS => 1,
            _ => std::thread::available_parallelism().map_or(1, |count| count.get()),
        };
        let share = self.outputs.div_ceil(threads).max(1);
        let rows = &rows;
        std::thread::scope(|scope| {
            for (index, sums) in sums.chunks_mut(share * self.rows.max(1)).enumerate() {
                let mut work = move || self.part(weights, rows, index * share, sums);
                if threads == 1 {
                    work();
                } else {
                    scope.spawn(work);
                }
            }
        });
        sums
    }

    /// The sums of the outputs from `first` on.
    fn part(&self, weights: &[u8], rows: &[Vec<f32>], first: usize, sums: &mut [f32]) {
        let mut values = vec![0.0; self.inputs];
        for (index, sums) in sums.chunks_mut(rows.len().max(1)).enumerate() {
            widen(&weights[2 * (first + index) * self.weight_stride..], &mut values);
            for (sum, row) in sums.iter_mut().zip(rows) {
                *sum = self.factor * dot(&values, row);
            }
        }
    }
}

/// bfloat16 to float.
fn widen(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
}

fn dot(left: &[f32], right: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (left, left_rest) = left.as_chunks::<LANES>();
    let (right, right_rest) = right.as_chunks::<LANES>();
    for (left, right) in left.iter().zip(right) {
        for lane in 0..LANES {
            lanes[lane] += left[lane] * right[lane];
        }
    }
    let rest: f32 = left_rest.iter().zip(right_rest).map(|(left, right)| left * right).sum();
    lanes.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small whole numbers, whose products and sums are exact.
    fn whole(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7 + seed * 3) % 11) as f32 - 5.0).collect()
    }

    fn narrow(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
    }

    #[test]
    fn every_output_is_the_product_of_its_row_of_weights_and_the_input() {
        for (rows, outputs, inputs) in [(1, 3, 5), (3, 17, 33), (9, 300, 900)] {
            let (weights, input) = (whole(outputs * inputs, 1), whole(rows * inputs, 2));
            let product = Product {
                weights: 0,
                input: 0,
                output: 0,
                outputs,
                inputs,
                rows,
                weight_stride: inputs,
                input_stride: inputs,
                output_stride: outputs,
                factor: 0.5,
            };
            let sums = product.run(&narrow(&weights), &narrow(&input));
            for row in 0..rows {
                for output in 0..outputs {
                    let terms = (0..inputs).map(|i| weights[output * inputs + i] * input[row * inputs + i]);
                    assert_eq!(sums[output * rows + row], 0.5 * terms.sum::<f32>(), "row {row}, output {output}");
                }
            }
        }
    }
}
