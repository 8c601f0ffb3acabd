//! The choices of the command line that have names: algorithms, types, reductions, operands.

use serde::{Deserialize, Serialize};

use crate::values::ValueError;

/// Declares an enum whose values have names, in the order of the declaration.
macro_rules! names {
    ($(#[$doc:meta])* $type:ident, $kind:literal { $($(#[$value_doc:meta])* $value:ident = $name:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub(crate) enum $type {
            $($(#[$value_doc])* #[serde(rename = $name)] $value),+
        }

        impl $type {
            /// All values.
            pub(crate) const ALL: &[Self] = &[$(Self::$value),+];

            /// Returns the name on the command line and in JSON.
            pub(crate) const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name),+
                }
            }

            /// Returns the value with this name.
            pub(crate) fn parse(text: &str) -> Result<Self, ValueError> {
                Self::ALL.iter().copied().find(|value| value.name() == text).ok_or_else(|| ValueError::Unknown {
                    kind: $kind,
                    given: text.to_owned(),
                    accepted: Self::ALL.iter().map(|value| value.name()).collect::<Vec<_>>().join(", "),
                })
            }
        }
    };
}

names! {
    /// An algorithm, or the tuner's choice.
    Algorithm, "algorithm" {
        Auto = "auto",
        OneShot = "one-shot",
        HalvingDoubling = "halving-doubling",
        Ring = "ring",
    }
}

names! {
    /// A type of elements.
    Type, "type" {
        F32 = "f32",
        F64 = "f64",
        F16 = "f16",
        Bf16 = "bf16",
        I8 = "i8",
        I16 = "i16",
        I32 = "i32",
        I64 = "i64",
        U8 = "u8",
        U16 = "u16",
        U32 = "u32",
        U64 = "u64",
    }
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

names! {
    /// How the elements of all ranks become one.
    Reduction, "reduction" {
        Sum = "sum",
        Mean = "mean",
        Min = "min",
        Max = "max",
    }
}

names! {
    /// The memory of an operation.
    Operand, "operand" {
        /// Registered memory, in place.
        Registered = "registered",
        /// Registered memory, with a result elsewhere.
        RegisteredOutOfPlace = "registered-out-of-place",
        /// Any memory, in place. The library copies it to registered memory and back.
        Slice = "slice",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_json() {
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::parse(algorithm.name()), Ok(*algorithm));
            assert_eq!(serde_json::to_value(algorithm).unwrap(), algorithm.name());
        }
        let error = Type::parse("f23").unwrap_err().to_string();
        assert!(error.contains("\"f23\"") && error.contains("f32, f64, f16, bf16"), "{error}");
    }
}
