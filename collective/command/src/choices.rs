//! The choices of the command line that have names: algorithms, types, operands. Tables and JSON use the same names.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::Named as _;

/// An algorithm, or that of the plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Algorithm {
    Auto,
    OneShot,
    HalvingDoubling,
    Ring,
}

impl Algorithm {
    /// Returns the algorithm of the library; `None` for that of the plans.
    pub(crate) fn fixed(self) -> Option<tonic_rdma_collective::Algorithm> {
        tonic_rdma_collective::Algorithm::from_name(self.name())
    }
}

/// A type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Type {
    F32,
    F64,
    F16,
    Bf16,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
}

impl Type {
    /// Returns the number of bytes of an element, and the number up to which the type holds every whole number.
    const fn facts(self) -> (u64, u64) {
        match self {
            Self::I8 => (1, i8::MAX as u64),
            Self::U8 => (1, u8::MAX as u64),
            Self::F16 => (2, 1 << 11),
            Self::Bf16 => (2, 1 << 8),
            Self::I16 => (2, i16::MAX as u64),
            Self::U16 => (2, u16::MAX as u64),
            Self::F32 => (4, 1 << 24),
            Self::I32 => (4, i32::MAX as u64),
            Self::U32 => (4, u32::MAX as u64),
            Self::F64 => (8, 1 << 53),
            Self::I64 => (8, i64::MAX as u64),
            Self::U64 => (8, u64::MAX),
        }
    }

    /// Returns the number of bytes of an element.
    pub(crate) const fn bytes(self) -> u64 {
        self.facts().0
    }

    /// Returns the number up to which the type holds every whole number.
    pub(crate) const fn exact(self) -> u64 {
        self.facts().1
    }

    /// Returns whether it is a floating-point type.
    pub(crate) const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }
}

/// The memory of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Operand {
    /// Registered memory, in place.
    Registered,
    /// Registered memory, with a result elsewhere.
    RegisteredOutOfPlace,
    /// Any memory, in place. The library copies it to registered memory and back.
    Slice,
}

#[cfg(test)]
mod tests {
    use tonic_rdma_commands::parse_name;

    use super::*;

    fn names_are_those_of_json<T: ValueEnum + Copy + Serialize + std::fmt::Debug + PartialEq>() {
        for value in T::value_variants() {
            assert_eq!(parse_name::<T>("value", value.name()), Ok(*value));
            assert_eq!(serde_json::to_value(value).unwrap(), value.name());
        }
    }

    #[test]
    fn names_are_those_of_json_and_unknown_ones_are_refused_with_a_list() {
        names_are_those_of_json::<Algorithm>();
        names_are_those_of_json::<Type>();
        names_are_those_of_json::<Operand>();
        let error = parse_name::<Type>("type", "f23").unwrap_err().to_string();
        assert!(error.contains("\"f23\"") && error.contains("f32, f64, f16, bf16"), "{error}");
        // The library has the same algorithms under the same names.
        let fixed = Algorithm::value_variants().iter().filter_map(|algorithm| algorithm.fixed());
        assert!(fixed.eq(tonic_rdma_collective::Algorithm::ALL));
    }
}
