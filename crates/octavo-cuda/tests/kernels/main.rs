//! The kernels' own PTX on a simulated device.

mod device;
mod int4;
mod sampling;
