//! Rust types of tensor elements.

use bytemuck::{CheckedBitPattern, NoUninit};
use half::{bf16, f16};

use super::Dtype;

/// A Rust type that is an element of a tensor. Complex numbers are `[f32; 2]` and `[f64; 2]`: real and imaginary part.
pub trait Element: sealed::Sealed + CheckedBitPattern + NoUninit + Send + Sync + 'static {
    /// Type of tensors with such elements.
    const DTYPE: Dtype;
}

mod sealed {
    /// Prevents implementations outside this crate.
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $element {}
        impl Element for $element {
            const DTYPE: Dtype = Dtype::$dtype;
        }
        const _: () = assert!(
            matches!(Dtype::$dtype.size(), Some(size) if size == size_of::<$element>())
                && Dtype::$dtype.align() == align_of::<$element>()
        );
    )*};
}

elements! {
    f16 => F16,
    bf16 => Bf16,
    f32 => F32,
    f64 => F64,
    i8 => I8,
    i16 => I16,
    i32 => I32,
    i64 => I64,
    u8 => U8,
    u16 => U16,
    u32 => U32,
    u64 => U64,
    bool => Bool,
    [f32; 2] => Complex64,
    [f64; 2] => Complex128,
}
