//! Whether this machine has all that the backend needs, and what is missing first.

use std::path::PathBuf;

use cudarc::driver::{
    DriverError, result,
    sys::{self, CUdevice_attribute as Attribute, CUresult},
};
use libloading::Library;

use crate::{
    cublaslt::CublasLt,
    error::{CudaError, Doing},
    images::images,
};

/// The least version of CUDA that a driver must know, as it reports it.
const NEEDED_VERSION: i32 = 12_000;

/// Names under which the loader may have the driver's library, the usual one first.
const DRIVER_NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Which GPU, and where its libraries may be.
#[derive(Debug, Clone, Default)]
pub struct CudaOptions {
    /// The GPU's number, from 0.
    pub device: usize,
    /// Folders that may hold cuBLASLt (such as `site-packages/nvidia/*/lib`); the loader's own are tried after them.
    pub library_folders: Vec<PathBuf>,
}

/// A GPU that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Major and minor.
    pub compute_capability: (u32, u32),
    /// Part of a system on a chip: binaries for cards do not run on it.
    pub is_integrated: bool,
    /// Bytes of memory.
    pub memory: usize,
    /// The version of CUDA that the driver supports, major and minor.
    pub driver: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// The file that has the matrix products.
    pub cublaslt: String,
}

/// Looks for the first GPU and everything that the backend needs to run on it.
///
/// # Errors
/// The first thing that is missing. Never panics.
pub fn probe() -> Result<DeviceInfo, CudaError> {
    probe_with(&CudaOptions::default())
}

/// As [`probe`], for another GPU or with more places to look at.
///
/// # Errors
/// As [`probe`].
pub fn probe_with(options: &CudaOptions) -> Result<DeviceInfo, CudaError> {
    let driver = driver_version()?;
    if driver < NEEDED_VERSION {
        return Err(CudaError::OldDriver { found: version(driver), needed: version(NEEDED_VERSION) });
    }
    let mut info = device_info(options.device, driver)?;
    if info.compute_capability < (8, 0) {
        return Err(CudaError::OldDevice { name: info.name, found: info.compute_capability });
    }
    images()?;
    info.cublaslt = CublasLt::find(&options.library_folders, info.driver)?.1;
    Ok(info)
}

/// The version that the driver reports. Asked for without cudarc, which panics when a library or a function is missing.
fn driver_version() -> Result<i32, CudaError> {
    let mut reasons = Vec::new();
    for name in DRIVER_NAMES {
        // SAFETY: loading the driver's library runs the driver's own initialisers.
        let library = match unsafe { Library::new(name) } {
            Ok(library) => library,
            Err(error) => {
                reasons.push(std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string));
                continue;
            }
        };
        // SAFETY: the function has this type in every version of the driver.
        let call = unsafe { library.get::<unsafe extern "C" fn(*mut i32) -> i32>(b"cuDriverGetVersion\0") };
        let Ok(call) = call else {
            reasons.push(format!("{name} has no cuDriverGetVersion"));
            continue;
        };
        let mut version = 0;
        // SAFETY: the address is valid, and no initialisation is asked for.
        if unsafe { call(&raw mut version) } == 0 {
            // SAFETY: only loads libraries.
            return match unsafe { sys::is_culib_present() } {
                true => Ok(version),
                false => Err(CudaError::NoDriver { reason: format!("{name} loads once and not twice") }),
            };
        }
        reasons.push(format!("{name} does not say its version"));
    }
    Err(CudaError::NoDriver { reason: reasons.join("; ") })
}

fn version(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn device_info(ordinal: usize, driver: i32) -> Result<DeviceInfo, CudaError> {
    let count = match result::init().and_then(|()| result::device::get_count()) {
        Ok(count) => usize::try_from(count).unwrap_or(0),
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => 0,
        Err(error) => return Err(CudaError::driver("starting the driver", error)),
    };
    if ordinal >= count {
        return Err(CudaError::NoDevice { found: count, wanted: ordinal });
    }
    let what = "asking for the GPU's properties";
    let device = result::device::get(ordinal as i32).doing(what)?;
    // SAFETY: the device exists.
    let attribute = |attribute| unsafe { result::device::get_attribute(device, attribute) }.doing(what);
    let capability = (
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    Ok(DeviceInfo {
        name: result::device::get_name(device).doing(what)?,
        compute_capability: (capability.0 as u32, capability.1 as u32),
        is_integrated: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        // SAFETY: as above.
        memory: unsafe { result::device::total_mem(device) }.doing(what)?,
        driver: (driver as u32 / 1000, driver as u32 % 1000 / 10),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        cublaslt: String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a driver, a real one or the fake, and all the rest there is nothing to say; without, the first thing missing is
    /// named.
    #[test]
    fn a_probe_never_panics_and_names_what_is_missing() {
        // SAFETY: only loads libraries.
        let has_driver = unsafe { Library::new("libcuda.so.1").is_ok() || Library::new("libcuda.so").is_ok() };
        match probe() {
            Ok(info) => assert!(has_driver && info.compute_capability >= (8, 0), "{info:?}"),
            Err(error) if !has_driver => {
                assert!(matches!(error, CudaError::NoDriver { .. }), "{error}");
                assert!(error.to_string().contains("libcuda.so.1"), "{error}");
            }
            Err(error) => assert!(!matches!(error, CudaError::NoDriver { .. }), "{error}"),
        }
    }

    #[test]
    fn versions_are_written_as_nvidia_writes_them() {
        assert_eq!(version(NEEDED_VERSION), "12.0");
        assert_eq!(version(11_080), "11.8");
    }
}
