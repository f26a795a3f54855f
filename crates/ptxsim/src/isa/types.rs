//! Types, registers and formats.

/// A register's number in its bank.
pub(crate) type Slot = u32;

/// The predicate that is true in every lane.
pub(crate) const ALWAYS: Slot = 0;
/// The predicate that is false in every lane; as a target of `setp` it is a place nobody reads.
pub(crate) const NEVER: Slot = 1;

/// A PTX type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Type {
    Pred,
    U8,
    S8,
    B8,
    U16,
    S16,
    B16,
    U32,
    S32,
    B32,
    U64,
    S64,
    B64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

impl Type {
    /// The type that a modifier names.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "u8" => Self::U8,
            "s8" => Self::S8,
            "b8" => Self::B8,
            "u16" => Self::U16,
            "s16" => Self::S16,
            "b16" => Self::B16,
            "u32" => Self::U32,
            "s32" => Self::S32,
            "b32" => Self::B32,
            "u64" => Self::U64,
            "s64" => Self::S64,
            "b64" => Self::B64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Bytes in memory (a predicate has none).
    pub fn bytes(self) -> u32 {
        match self {
            Self::Pred => 0,
            Self::U8 | Self::S8 | Self::B8 => 1,
            Self::U16 | Self::S16 | Self::B16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::S32 | Self::B32 | Self::F16x2 | Self::Bf16x2 | Self::F32 => 4,
            Self::U64 | Self::S64 | Self::B64 | Self::F64 => 8,
        }
    }

    /// True for the signed integers.
    pub fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    /// The floating-point format, if it is one.
    pub fn format(self) -> Option<Format> {
        Some(match self {
            Self::F16 => Format::F16,
            Self::F16x2 => Format::F16x2,
            Self::Bf16 => Format::Bf16,
            Self::Bf16x2 => Format::Bf16x2,
            Self::F32 => Format::F32,
            Self::F64 => Format::F64,
            _ => return None,
        })
    }

    /// The width of integer arithmetic in this type; none for bytes, floats and predicates.
    pub fn width(self) -> Option<Width> {
        match self {
            Self::U16 | Self::S16 | Self::B16 => Some(Width::Half),
            Self::U32 | Self::S32 | Self::B32 => Some(Width::Word),
            Self::U64 | Self::S64 | Self::B64 => Some(Width::Double),
            _ => None,
        }
    }
}

/// Where a register lives and how wide it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Bank {
    Predicate,
    /// 16 bits, in the bank of words.
    Half,
    Word,
    Double,
}

/// A register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Register {
    pub bank: Bank,
    pub slot: Slot,
}

/// Width of integer arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    Half,
    Word,
    Double,
}

/// A floating-point format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

/// Rounding to a whole number or to a narrower format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}
