//! The kernels' real PTX on a simulated device, against plain programs in f64, with what they move counted.

#![allow(clippy::unwrap_used, missing_docs)]

mod attention;
mod case;
mod device;
mod int4;
mod mutations;
mod pointwise;
mod sampling;
