//! What the receiver does with a payload once it is there and before it answers.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

use super::mode::Mode;

/// The setting `--consume`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Consume {
    /// As each mode's users have it: a gRPC service is handed the bytes as they are, and whoever gets a tensor computes with it.
    #[default]
    Auto,
    /// [`reduce_max`] in every mode, as in §5.1 of Xue et al., "Fast Distributed Deep Learning over RDMA" (EuroSys 2019).
    ReduceMax,
    /// Nothing in any mode.
    None,
}

impl Consume {
    /// Whether `mode`'s receiver looks for the largest element.
    pub(crate) const fn reduces(self, mode: Mode) -> bool {
        match self {
            Self::Auto => mode.carries_tensors(),
            Self::ReduceMax => true,
            Self::None => false,
        }
    }
}

impl fmt::Display for Consume {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Auto => "auto",
            Self::ReduceMax => "reduce-max",
            Self::None => "none",
        })
    }
}

const ELEMENT: usize = size_of::<f32>();

/// Running maxima, independent of one another: enough for the widest vectors, and for as many of them as a core has under way.
const LANES: usize = 32;

/// The largest element of `bytes` as little-endian `f32`, wherever they lie in memory; fewer than four at the end are an
/// element whose other bytes are zero. NaN counts for nothing; with nothing else the result is −∞, and never NaN.
//
// As a function of its own it is compiled to vector instructions; within a service's method it was not, and took 30 times as long.
#[inline(never)]
pub(crate) fn reduce_max(bytes: &[u8]) -> f32 {
    let mut maxima = [f32::NEG_INFINITY; LANES];
    let mut blocks = bytes.chunks_exact(LANES * ELEMENT);
    for block in blocks.by_ref() {
        for (maximum, bytes) in maxima.iter_mut().zip(block.chunks_exact(ELEMENT)) {
            *maximum = larger(element(bytes), *maximum);
        }
    }
    for (maximum, bytes) in maxima.iter_mut().zip(blocks.remainder().chunks(ELEMENT)) {
        *maximum = larger(element(bytes), *maximum);
    }
    maxima.into_iter().fold(f32::NEG_INFINITY, |maximum, value| larger(value, maximum))
}

/// The largest element of all `buffers`.
pub(crate) fn reduce_max_of<'a>(buffers: impl IntoIterator<Item = &'a [u8]>) -> f32 {
    buffers.into_iter().map(reduce_max).fold(f32::NEG_INFINITY, |maximum, value| larger(value, maximum))
}

/// One instruction where `f32::max` is several; a `value` that is NaN is never larger.
fn larger(value: f32, maximum: f32) -> f32 {
    if value > maximum { value } else { maximum }
}

fn element(bytes: &[u8]) -> f32 {
    match bytes.first_chunk() {
        Some(whole) => f32::from_le_bytes(*whole),
        None => {
            let mut padded = [0; ELEMENT];
            padded[..bytes.len()].copy_from_slice(bytes);
            f32::from_le_bytes(padded)
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    /// The definition, one element after the other.
    fn by_definition(bytes: &[u8]) -> f32 {
        let elements = bytes.chunks(4).map(|part| {
            let mut element = [0; 4];
            element[..part.len()].copy_from_slice(part);
            f32::from_le_bytes(element)
        });
        elements.filter(|value| !value.is_nan()).fold(f32::NEG_INFINITY, f32::max)
    }

    #[test]
    fn the_largest_is_found_wherever_it_is() {
        for len in [1, 31, 32, 33, 127, 128, 1000] {
            for at in 0..len {
                let mut values = vec![-2.5f32; len];
                values[at] = -1.5;
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                assert_eq!(reduce_max(&bytes), -1.5, "{at} of {len}");
            }
        }
    }

    #[test]
    fn what_is_no_number_counts_for_nothing() {
        assert_eq!(reduce_max(&[]), f32::NEG_INFINITY);
        assert_eq!(reduce_max(&f32::NAN.to_le_bytes().repeat(100)), f32::NEG_INFINITY);
        let mixed = [f32::NAN, 1.0, -f32::NAN, 2.0, f32::NAN].map(f32::to_le_bytes).concat();
        assert_eq!(reduce_max(&mixed), 2.0);
        assert_eq!(reduce_max_of([&mixed[..8], &mixed[8..], &[]]), 2.0);
        assert_eq!(reduce_max_of([]), f32::NEG_INFINITY);
    }

    #[test]
    fn only_modes_that_carry_tensors_consume_unless_all_shall_or_none() {
        for mode in Mode::ALL {
            assert_eq!(Consume::Auto.reduces(mode), mode.carries_tensors(), "{mode}");
            assert!(Consume::ReduceMax.reduces(mode) && !Consume::None.reduces(mode));
        }
        assert!(!Consume::Auto.reduces(Mode::GrpcTcp) && !Consume::Auto.reduces(Mode::Memcpy));
    }

    #[test]
    fn a_setting_survives_its_way_to_the_other_process() {
        for setting in Consume::value_variants() {
            assert_eq!(Consume::from_str(&setting.to_string(), false), Ok(*setting));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_at_any_address_are_as_the_definition_says(
            bytes in proptest::collection::vec(any::<u8>(), 0..700), skip in 0usize..8,
        ) {
            let bytes = &bytes[skip.min(bytes.len())..];
            prop_assert_eq!(reduce_max(bytes), by_definition(bytes));
        }
    }
}
