//! The compiled kernels, in this program or in a folder, and the choice among them.

use std::{env, fs, path::Path, sync::OnceLock};

use crate::{error::CudaError, probe::DeviceInfo};

/// Names a folder of compiled kernels that are used in place of those in the program.
pub const KERNELS_VARIABLE: &str = "OCTAVO_CUDA_KERNELS";

/// A compiled source file.
#[derive(Debug, Clone, Copy)]
pub struct Image {
    /// The source file's name, without its extension.
    pub module: &'static str,
    /// For which GPUs it is a binary, such as `sm_90`; none for PTX, which the driver compiles.
    pub architecture: Option<&'static str>,
    /// The binary or the text.
    pub bytes: &'static [u8],
}

/// Those in the program; none without the feature `kernels`.
static EMBEDDED: &[Image] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The kernels of this process: of the folder that [`KERNELS_VARIABLE`] names, if it does, or those in the program.
///
/// # Errors
/// [`CudaError::KernelsFolder`] if the folder cannot be read or has no PTX, [`CudaError::NoKernels`] without either.
pub fn images() -> Result<&'static [Image], CudaError> {
    static IMAGES: OnceLock<Result<Vec<Image>, CudaError>> = OnceLock::new();
    let images = IMAGES.get_or_init(|| match env::var_os(KERNELS_VARIABLE).filter(|folder| !folder.is_empty()) {
        Some(folder) => images_of(Path::new(&folder)),
        None if EMBEDDED.is_empty() => Err(CudaError::NoKernels),
        None => Ok(EMBEDDED.to_vec()),
    });
    images.as_deref().map_err(Clone::clone)
}

/// The images in a folder: `{module}.ptx` and `{module}.{architecture}.cubin`. They stay in memory.
fn images_of(folder: &Path) -> Result<Vec<Image>, CudaError> {
    let wrong = |what: String| CudaError::KernelsFolder { found: format!("{}: {what}", folder.display()) };
    let mut images = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| wrong(error.to_string()))? {
        let path = entry.map_err(|error| wrong(error.to_string()))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let (module, architecture) = match name.split('.').collect::<Vec<_>>()[..] {
            [module, "ptx"] => (module, None),
            [module, architecture, "cubin"] => (module, Some(architecture)),
            _ => continue,
        };
        let kept = |name: &str| -> &'static str { String::leak(name.to_owned()) };
        let bytes = fs::read(&path).map_err(|error| wrong(format!("{name}: {error}")))?;
        images.push(Image { module: kept(module), architecture: architecture.map(kept), bytes: bytes.leak() });
    }
    match images.iter().any(|image| image.architecture.is_none()) {
        true => Ok(images),
        false => Err(wrong("no .ptx".to_owned())),
    }
}

impl Image {
    /// The image of a module that suits a GPU best: a binary for exactly this one, one for an older GPU of its generation,
    /// or PTX.
    pub fn of<'a>(images: &'a [Image], module: &str, device: &DeviceInfo) -> Option<&'a Image> {
        let suits = |image: &&Image| image.module == module && image.rank(device).is_some();
        images.iter().filter(suits).max_by_key(|image| image.rank(device))
    }

    /// How well it suits a GPU; not at all if it does not run there.
    fn rank(&self, device: &DeviceInfo) -> Option<u32> {
        let Some(architecture) = self.architecture else { return Some(0) };
        let (major, minor) = device.compute_capability;
        let name = architecture.trim_start_matches("sm_");
        // With a letter behind the number, a binary runs on exactly that one GPU.
        let digits = name.trim_end_matches(|end: char| end.is_ascii_alphabetic());
        let number: u32 = digits.parse().ok()?;
        if number == major * 10 + minor {
            return Some(2000 + u32::from(digits != name));
        }
        let is_older = number / 10 == major && number % 10 < minor && digits == name;
        (is_older && !device.is_integrated).then_some(1000 + number)
    }

    /// The image as the driver reads it: aligned, and ended by a zero if it is text.
    pub fn loadable(&self) -> Vec<u64> {
        let mut words = vec![0u64; self.bytes.len() / 8 + 1];
        for (word, bytes) in words.iter_mut().zip(self.bytes.chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(padded);
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(compute_capability: (u32, u32), is_integrated: bool) -> Option<&'static str> {
        let image = |architecture| Image { module: "attention", architecture, bytes: b"image" };
        let other = Image { module: "sampling", architecture: Some("sm_120"), bytes: b"image" };
        let images = [None, Some("sm_80"), Some("sm_86"), Some("sm_90"), Some("sm_90a"), Some("sm_120")].map(image);
        let images = [&images[..], &[other]].concat();
        let device = DeviceInfo {
            name: String::new(),
            compute_capability,
            is_integrated,
            memory: 0,
            driver: (12, 0),
            multiprocessors: 1,
            cublaslt: String::new(),
        };
        Image::of(&images, "attention", &device).expect("PTX runs everywhere").architecture
    }

    #[test]
    fn a_binary_for_the_gpu_or_an_older_one_of_its_generation_is_taken_and_ptx_otherwise() {
        assert_eq!(chosen((8, 0), false), Some("sm_80"));
        assert_eq!(chosen((8, 9), false), Some("sm_86"));
        assert_eq!(chosen((9, 0), false), Some("sm_90a"));
        assert_eq!(chosen((12, 1), false), Some("sm_120"));
        assert_eq!(chosen((10, 0), false), None);
        assert_eq!(chosen((8, 7), true), None, "a chip that takes no binaries of cards");
    }

    #[test]
    fn a_folder_has_images_of_each_module_and_other_files_are_passed_over() {
        let folder = env::temp_dir().join(format!("octavo-images-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let found = |folder: &Path| images_of(folder).map_err(|error| error.to_string());
        fs::write(folder.join("attention.sm_90.cubin"), "binary").unwrap();
        let error = found(&folder).unwrap_err();
        assert!(error.contains("OCTAVO_CUDA_KERNELS: found") && error.contains("no .ptx"), "{error}");
        for (name, text) in [("attention.ptx", "text"), ("resources.json", "{}"), ("a.b.c.cubin", "")] {
            fs::write(folder.join(name), text).unwrap();
        }
        let mut images = found(&folder).unwrap();
        images.sort_by_key(|image| image.architecture);
        let facts = images.iter().map(|image| (image.module, image.architecture, image.bytes)).collect::<Vec<_>>();
        assert_eq!(facts, [("attention", None, &b"text"[..]), ("attention", Some("sm_90"), &b"binary"[..])]);
        fs::remove_dir_all(&folder).unwrap();
        assert!(found(&folder).unwrap_err().contains("No such file"));
    }

    #[test]
    fn text_ends_with_a_zero_whatever_its_length() {
        for length in 0..17 {
            let image = Image { module: "", architecture: None, bytes: &b"0123456789abcdefg"[..length] };
            let bytes: Vec<u8> = image.loadable().iter().flat_map(|word| word.to_ne_bytes()).collect();
            assert_eq!(&bytes[..length], image.bytes);
            assert!(bytes.len() > length && bytes[length..].iter().all(|&byte| byte == 0));
        }
    }
}
