//! The compiled kernels in this program, and the choice among them.

use crate::probe::DeviceInfo;

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

/// All of them; none without the feature `kernels`.
pub static IMAGES: &[Image] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

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
        let images =
            [None, Some("sm_80"), Some("sm_86"), Some("sm_90"), Some("sm_90a"), Some("sm_120")].map(image);
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
    fn text_ends_with_a_zero_whatever_its_length() {
        for length in 0..17 {
            let image = Image { module: "", architecture: None, bytes: &b"0123456789abcdefg"[..length] };
            let bytes: Vec<u8> = image.loadable().iter().flat_map(|word| word.to_ne_bytes()).collect();
            assert_eq!(&bytes[..length], image.bytes);
            assert!(bytes.len() > length && bytes[length..].iter().all(|&byte| byte == 0));
        }
    }
}
