//! The instruction sets that the kernels are compiled for, and which of them this machine has.

use std::{fmt, str::FromStr};

/// An instruction set. Of one architecture a later one is faster. All give the same bits, subnormal numbers apart:
/// [`Isa::Avx512Bf16`] takes them for zeros in [`crate::simd::Simd::dot_bf16`], [`Isa::Amx`] in products that are chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust: every machine.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// [`Isa::Avx2`] with AVX-VNNI, the integer dot product.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// [`Isa::Avx512`] with the bfloat16 dot product.
    Avx512Bf16,
    /// [`Isa::Avx512Bf16`] with a matrix unit.
    Amx,
    /// AArch64 with NEON and its integer dot product.
    Neon,
}

impl Isa {
    /// Every instruction set, those of one architecture slowest first.
    pub const ALL: [Isa; 7] = [Isa::Scalar, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx, Isa::Neon];

    /// The fastest that this machine has.
    pub fn detect() -> Isa {
        match Isa::ALL.into_iter().rev().find(|isa| isa.is_supported()) {
            // Intel's bfloat16 dot product takes four times as long as a fused multiply-add; AMD's takes as long.
            Some(Isa::Avx512Bf16) if is_intel() => Isa::Avx512,
            found => found.unwrap_or(Isa::Scalar),
        }
    }

    /// All that this machine has, slowest first.
    pub fn supported() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_supported()).collect()
    }

    /// True when this machine has it.
    pub fn is_supported(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => has_avx2() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => has_avx512(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => has_avx512() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512Bf16.is_supported() && crate::amx::is_supported(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("dotprod"),
            // Those of other architectures.
            _ => false,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::Amx => "amx",
            Isa::Neon => "neon-dotprod",
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    // The vendor's name is spread over three registers.
    let leaf = std::arch::x86_64::__cpuid(0);
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_intel() -> bool {
    false
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn names() -> String {
    Isa::ALL.map(Isa::name).join(", ")
}

/// A name that is no instruction set of octavo.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("instruction set: found {found:?}, expected one of {}", names())]
pub struct UnknownIsa {
    /// The name.
    pub found: String,
}

impl FromStr for Isa {
    type Err = UnknownIsa;

    /// Reads a name as [`fmt::Display`] writes it; says nothing about whether this machine has it.
    fn from_str(name: &str) -> Result<Isa, UnknownIsa> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| UnknownIsa { found: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_a_round_trip() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = "avx1024".parse::<Isa>().unwrap_err().to_string();
        assert!(error.contains("avx1024"), "{error}");
        for isa in Isa::ALL {
            assert!(error.contains(isa.name()), "{error}");
        }
    }

    #[test]
    fn the_detected_set_is_one_of_the_last_two_of_the_supported_ones() {
        let supported = Isa::supported();
        assert_eq!(supported[0], Isa::Scalar);
        let last = supported.iter().rev().take(if supported.contains(&Isa::Avx512Bf16) { 2 } else { 1 });
        assert!(last.copied().any(|isa| isa == Isa::detect()));
    }
}
