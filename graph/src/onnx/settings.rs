//! What a program can ask for when it loads a model.

use std::fmt;
use std::str::FromStr;

use crate::dataflow::Dim;

/// How a model is loaded. The default takes the model as it is in the file.
#[derive(Clone, Debug, Default)]
pub struct ModelSettings {
    /// Where the weights come from.
    pub weights: Weights,
    /// Dimensions of inputs that get another length, or a symbol.
    pub dims: Vec<SymbolicDim>,
}

/// Where the weights of a model come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// From the file.
    #[default]
    File,
    /// From a generator with this seed. Weights of convolutions, matrix products, normalisations and recurrent layers get random
    /// values of a scale that keeps activations finite and different from zero. All other constants stay as they are in the file. The
    /// model is then good for comparing results, and for nothing else. It makes a check worth something where all weights in the file
    /// are equal, as in the `light` models of ONNX.
    Seeded(u64),
}

/// The length of a dimension of an input. Written as `input:0=N`, or `input:0=8`.
///
/// ```
/// use tonic_rdma_graph::dataflow::Dim;
/// use tonic_rdma_graph::onnx::SymbolicDim;
///
/// let batch: SymbolicDim = "data:0=N".parse()?;
/// assert_eq!((batch.input.as_str(), batch.axis, batch.dim), ("data", 0, Dim::Symbolic("N".into())));
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SymbolicDim {
    /// The name of the input.
    pub input: String,
    /// The number of the dimension, from 0.
    pub axis: usize,
    /// The length.
    pub dim: Dim,
}

impl FromStr for SymbolicDim {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is no dimension of an input; write INPUT:AXIS=SYMBOL, such as data:0=N");
        // Names of ONNX may hold colons.
        let (place, length) = text.rsplit_once('=').ok_or_else(wrong)?;
        let (input, axis) = place.rsplit_once(':').ok_or_else(wrong)?;
        let axis = axis.parse().map_err(|_| wrong())?;
        let symbol = |text: &str| {
            text.starts_with(|c: char| c.is_ascii_alphabetic())
                && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        let dim = match length.parse() {
            Ok(length) if length > 0 => Dim::Known(length),
            Err(_) if symbol(length) => Dim::Symbolic(length.into()),
            _ => return Err(wrong()),
        };
        if input.is_empty() {
            return Err(wrong());
        }
        Ok(Self { input: input.to_owned(), axis, dim })
    }
}

impl fmt::Display for SymbolicDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}={}", self.input, self.axis, self.dim)
    }
}
