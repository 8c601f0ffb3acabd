//! What the coordinator and the parts make alike: the settings of the model, inputs, digests.

use std::collections::BTreeMap;

use tonic_rdma_commands::Failure;
use tonic_rdma_graph::onnx::{ModelSettings, ModelValue, SymbolicDim, Weights};
use xxhash_rust::xxh3::xxh3_64;

/// Returns the settings of a model. All processes load it with the same settings.
pub(crate) fn settings(symbols: &[String], seed: u64) -> Result<ModelSettings, Failure> {
    let dims: Result<Vec<SymbolicDim>, String> = symbols.iter().map(|symbol| symbol.parse()).collect();
    let dims = dims.map_err(|reason| Failure::usage(format!("--symbol: {reason}")))?;
    Ok(ModelSettings { weights: Weights::Seeded(seed), dims })
}

/// Returns the lengths of the symbolic dimensions in a set of inputs. Each symbol begins at another place of the list.
pub(crate) fn lengths(symbols: &[String], lengths: &[u64], set: u64) -> BTreeMap<String, u64> {
    let places = symbols.iter().zip(set as usize..);
    places
        .filter_map(|(symbol, place)| Some((symbol.clone(), *lengths.get(place % lengths.len().max(1))?)))
        .collect()
}

/// Returns the digest of a tensor: of its shape and its bytes.
pub(crate) fn digest(value: &ModelValue) -> Result<u64, Failure> {
    let spec = value.spec().map_err(|error| Failure::run(error.to_string()))?;
    // Tensors with the same bytes and other shapes differ.
    Ok(xxh3_64(value.bytes()).rotate_left(1) ^ xxh3_64(spec.to_string().as_bytes()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use tonic_rdma_graph::dataflow::Value as _;
    use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

    use super::*;

    #[test]
    fn digests_tell_contents_and_shapes_apart() {
        let of = |dims: &[u64], last: u8| {
            let spec = TensorSpec::new(Dtype::U8, Shape::new(dims).unwrap()).unwrap();
            let mut fill = |bytes: &mut [u8]| {
                bytes.fill(0);
                bytes[5] = last;
                Ok(())
            };
            digest(&ModelValue::filled(&spec, &mut fill).unwrap()).unwrap()
        };
        assert_eq!(of(&[2, 3], 1), of(&[2, 3], 1));
        assert!(of(&[2, 3], 1) != of(&[2, 3], 2) && of(&[2, 3], 1) != of(&[3, 2], 1));
    }

    #[test]
    fn symbols_take_the_lengths_in_turn() {
        let symbols = ["a".to_owned(), "b".to_owned()];
        let found = |set| lengths(&symbols, &[5, 6, 7], set).into_values().collect::<Vec<_>>();
        assert_eq!([found(0), found(1), found(2), found(3)], [[5, 6], [6, 7], [7, 5], [5, 6]]);
    }
}
