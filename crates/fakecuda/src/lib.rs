//! A CUDA driver for machines without a GPU, for tests: `libcuda.so.1`, and of cuBLASLt what matrix products need.
//!
//! Kernels run in [`ptxsim`], from their PTX. Where a real driver is merely dangerous, this one is strict:
//! - device memory is no host memory: reading it there is a fault of the process;
//! - work is queued and runs only at a synchronisation, so that one that is missing shows; pinned host memory is read then,
//!   not when the copy is queued;
//! - fresh device memory and pinned memory hold NaN;
//! - a kernel that does what it must not makes every later call fail with `CUDA_ERROR_LAUNCH_FAILED`, until the last user of
//!   the context lets go of it. The fault is printed, is the text of the error, and [`driver::fakecuda_last_fault`] has it.
//!
//! The device says compute capability 8.7, an integrated chip, which takes no binaries made for cards: programs have to fall
//! back to PTX.
//!
//! The same file serves as both libraries. It must be *linked* to both names, not copied: the loader takes two copies for two
//! libraries, and each would have a device of its own.

pub mod codes;
pub mod cublaslt;
pub mod driver;
pub mod product;
pub mod state;
