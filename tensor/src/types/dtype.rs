//! Types of tensor elements, and the Rust types that have them.

use std::fmt;
use std::str::FromStr;

use bytemuck::{CheckedBitPattern, NoUninit};
use half::{bf16, f16};

use crate::error::TensorError;
use crate::types::ValueError;

/// Type of the elements of a tensor.
///
/// ```
/// use tonic_rdma_tensor::Dtype;
///
/// let bf16: Dtype = "bfloat16".parse()?;
/// assert_eq!((bf16, bf16.size()), (Dtype::Bf16, Some(2)));
/// # Ok::<(), tonic_rdma_tensor::TensorError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an `f32`.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// 4 bits of exponent, 3 of mantissa, no infinity (OCP 8-bit floating point, E4M3).
    F8E4M3,
    /// 5 bits of exponent, 2 of mantissa (OCP 8-bit floating point, E5M2).
    F8E5M2,
    /// Signed, 8 bits.
    I8,
    /// Signed, 16 bits.
    I16,
    /// Signed, 32 bits.
    I32,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 8 bits.
    U8,
    /// Unsigned, 16 bits.
    U16,
    /// Unsigned, 32 bits.
    U32,
    /// Unsigned, 64 bits.
    U64,
    /// A byte that is 0 or 1.
    Bool,
    /// Two `f32`: real and imaginary part.
    Complex64,
    /// Two `f64`: real and imaginary part.
    Complex128,
    /// Any number of bytes. Such tensors move in serialised form only.
    String,
}

/// One line of the table of types.
struct Row {
    dtype: Dtype,
    code: u16,
    size: usize,
    align: usize,
    name: &'static str,
    safetensors: Option<&'static str>,
}

#[rustfmt::skip]
const TABLE: [Row; 18] = [
    row(Dtype::F16,        1,  2, 2, "float16",       Some("F16")),
    row(Dtype::Bf16,       2,  2, 2, "bfloat16",      Some("BF16")),
    row(Dtype::F32,        3,  4, 4, "float32",       Some("F32")),
    row(Dtype::F64,        4,  8, 8, "float64",       Some("F64")),
    row(Dtype::F8E4M3,     5,  1, 1, "float8_e4m3fn", Some("F8_E4M3")),
    row(Dtype::F8E5M2,     6,  1, 1, "float8_e5m2",   Some("F8_E5M2")),
    row(Dtype::I8,         7,  1, 1, "int8",          Some("I8")),
    row(Dtype::I16,        8,  2, 2, "int16",         Some("I16")),
    row(Dtype::I32,        9,  4, 4, "int32",         Some("I32")),
    row(Dtype::I64,        10, 8, 8, "int64",         Some("I64")),
    row(Dtype::U8,         11, 1, 1, "uint8",         Some("U8")),
    row(Dtype::U16,        12, 2, 2, "uint16",        Some("U16")),
    row(Dtype::U32,        13, 4, 4, "uint32",        Some("U32")),
    row(Dtype::U64,        14, 8, 8, "uint64",        Some("U64")),
    row(Dtype::Bool,       15, 1, 1, "bool",          Some("BOOL")),
    row(Dtype::Complex64,  16, 8, 4, "complex64",     Some("C64")),
    row(Dtype::Complex128, 17, 16, 8, "complex128",   None),
    row(Dtype::String,     18, 0, 1, "string",        None),
];

const fn row(
    dtype: Dtype,
    code: u16,
    size: usize,
    align: usize,
    name: &'static str,
    safetensors: Option<&'static str>,
) -> Row {
    Row { dtype, code, size, align, name, safetensors }
}

impl Dtype {
    /// Returns all types.
    ///
    /// ```
    /// use tonic_rdma_tensor::Dtype;
    ///
    /// assert!(Dtype::all().any(|dtype| dtype.name() == "float32"));
    /// ```
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.dtype)
    }

    /// Returns the number of bytes of an element, or `None` if elements have a variable length.
    pub const fn size(self) -> Option<usize> {
        match self.row().size {
            0 => None,
            size => Some(size),
        }
    }

    /// Returns the alignment of an element, in bytes.
    pub const fn align(self) -> usize {
        self.row().align
    }

    /// Returns the name of the type in numpy (with `ml_dtypes`).
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the name of the type in safetensors files, if the format has the type.
    pub const fn safetensors_name(self) -> Option<&'static str> {
        self.row().safetensors
    }

    /// Returns the type's code on the wire, which never changes.
    pub const fn code(self) -> u16 {
        self.row().code
    }

    const fn row(self) -> &'static Row {
        // The table has the order of declaration; a test checks this.
        &TABLE[self as usize]
    }
}

impl TryFrom<u16> for Dtype {
    type Error = TensorError;

    fn try_from(code: u16) -> Result<Self, TensorError> {
        TABLE
            .iter()
            .find(|row| row.code == code)
            .map(|row| row.dtype)
            .ok_or_else(|| ValueError::UnknownCode(code).into())
    }
}

impl FromStr for Dtype {
    type Err = TensorError;

    /// Parses a name of numpy or of safetensors.
    fn from_str(name: &str) -> Result<Self, TensorError> {
        let row = TABLE.iter().find(|row| row.name == name || row.safetensors == Some(name));
        row.map(|row| row.dtype)
            .ok_or_else(|| ValueError::UnknownName(name.chars().take(40).collect()).into())
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that is an element of a tensor. Complex numbers are `[f32; 2]` and `[f64; 2]`: real and
/// imaginary part.
pub trait Element: sealed::Sealed + CheckedBitPattern + NoUninit + Send + Sync + 'static {
    /// Type of tensors with such elements.
    const DTYPE: Dtype;
}

mod sealed {
    /// Prevents implementations outside this crate.
    #[expect(unnameable_types, reason = "so only this crate implements it")]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_convert_back_to_the_type() {
        for (place, row) in TABLE.iter().enumerate() {
            assert_eq!(row.dtype as usize, place);
            assert_eq!(Dtype::try_from(row.code), Ok(row.dtype));
            assert_eq!(row.dtype.to_string().parse(), Ok(row.dtype));
            if let Some(name) = row.dtype.safetensors_name() {
                assert_eq!(name.parse(), Ok(row.dtype));
            }
        }
        let codes: std::collections::HashSet<u16> = Dtype::all().map(Dtype::code).collect();
        assert_eq!(codes.len(), TABLE.len());
    }

    #[test]
    fn codes_never_change() {
        let codes = [Dtype::F16, Dtype::F32, Dtype::I64, Dtype::Bool, Dtype::String].map(Dtype::code);
        assert_eq!(codes, [1, 3, 10, 15, 18]);
    }

    #[test]
    fn unknown_types_are_named() {
        assert_eq!(Dtype::try_from(0).unwrap_err().to_string(), "unknown tensor type with code 0");
        assert_eq!("f31".parse::<Dtype>().unwrap_err().to_string(), "unknown tensor type `f31`");
        let long = "x".repeat(1 << 20).parse::<Dtype>().unwrap_err();
        assert!(long.to_string().len() < 100);
    }
}
