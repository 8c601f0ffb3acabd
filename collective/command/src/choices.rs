//! The choices of the command line that have names: algorithms, types, reductions, operands.

use serde::{Deserialize, Serialize};
use tonic_rdma_commands::ValueError;

/// Values that have names on the command line, in tables and in JSON.
pub(crate) trait Named: Copy + PartialEq + 'static {
    /// What the values are, for messages.
    const KIND: &'static str;
    /// All values and their names.
    const ALL: &'static [(Self, &'static str)];

    /// Returns the name.
    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(value, _)| *value == self).map_or("", |(_, name)| name)
    }

    /// Returns the value with this name.
    fn parse(text: &str) -> Result<Self, ValueError> {
        Self::ALL.iter().find(|(_, name)| *name == text).map(|(value, _)| *value).ok_or_else(|| {
            ValueError::unknown_name(
                Self::KIND,
                text,
                Self::ALL.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(", "),
            )
        })
    }
}

/// An algorithm, or the tuner's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Algorithm {
    Auto,
    OneShot,
    HalvingDoubling,
    Ring,
}

impl Named for Algorithm {
    const KIND: &'static str = "algorithm";
    const ALL: &'static [(Self, &'static str)] = &[
        (Self::Auto, "auto"),
        (Self::OneShot, "one-shot"),
        (Self::HalvingDoubling, "halving-doubling"),
        (Self::Ring, "ring"),
    ];
}

/// A type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
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

impl Named for Type {
    const KIND: &'static str = "type";
    const ALL: &'static [(Self, &'static str)] = &[
        (Self::F32, "f32"),
        (Self::F64, "f64"),
        (Self::F16, "f16"),
        (Self::Bf16, "bf16"),
        (Self::I8, "i8"),
        (Self::I16, "i16"),
        (Self::I32, "i32"),
        (Self::I64, "i64"),
        (Self::U8, "u8"),
        (Self::U16, "u16"),
        (Self::U32, "u32"),
        (Self::U64, "u64"),
    ];
}

impl Type {
    /// Returns the number of bytes of an element.
    pub(crate) const fn bytes(self) -> u64 {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// Returns whether it is a floating-point type.
    pub(crate) const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }

    /// Returns the number up to which the type holds every whole number.
    pub(crate) const fn exact(self) -> u64 {
        match self {
            Self::I8 => i8::MAX as u64,
            Self::U8 => u8::MAX as u64,
            Self::Bf16 => 1 << 8,
            Self::F16 => 1 << 11,
            Self::I16 => i16::MAX as u64,
            Self::U16 => u16::MAX as u64,
            Self::F32 => 1 << 24,
            Self::I32 => i32::MAX as u64,
            Self::U32 => u32::MAX as u64,
            Self::F64 => 1 << 53,
            Self::I64 => i64::MAX as u64,
            Self::U64 => u64::MAX,
        }
    }
}

/// How the elements of all ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Reduction {
    Sum,
    Mean,
    Min,
    Max,
}

impl Named for Reduction {
    const KIND: &'static str = "reduction";
    const ALL: &'static [(Self, &'static str)] =
        &[(Self::Sum, "sum"), (Self::Mean, "mean"), (Self::Min, "min"), (Self::Max, "max")];
}

/// The memory of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Operand {
    /// Registered memory, in place.
    Registered,
    /// Registered memory, with a result elsewhere.
    RegisteredOutOfPlace,
    /// Any memory, in place. The library copies it to registered memory and back.
    Slice,
}

impl Named for Operand {
    const KIND: &'static str = "operand";
    const ALL: &'static [(Self, &'static str)] = &[
        (Self::Registered, "registered"),
        (Self::RegisteredOutOfPlace, "registered-out-of-place"),
        (Self::Slice, "slice"),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_are_those_of_json<T: Named + Serialize + std::fmt::Debug>() {
        for (value, name) in T::ALL {
            assert_eq!((T::parse(name).as_ref(), value.name()), (Ok(value), *name));
            assert_eq!(serde_json::to_value(value).unwrap(), *name);
        }
    }

    #[test]
    fn names_are_those_of_json_and_unknown_ones_are_refused_with_a_list() {
        names_are_those_of_json::<Algorithm>();
        names_are_those_of_json::<Type>();
        names_are_those_of_json::<Reduction>();
        names_are_those_of_json::<Operand>();
        let error = Type::parse("f23").unwrap_err().to_string();
        assert!(error.contains("\"f23\"") && error.contains("f32, f64, f16, bf16"), "{error}");
    }
}
