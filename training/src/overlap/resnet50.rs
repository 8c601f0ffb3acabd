//! The parameters of ResNet-50 (He et al. 2015, arXiv:1512.03385, table 1), in the order of its backward pass.
//!
//! The form is the one that trainers use ("v1.5"): the convolution of 3 × 3 has the stride of a stage, and each convolution is
//! followed by a batch normalisation and has no bias. Pictures have 224 × 224 pixels in 3 channels, and 1000 classes.

/// A layer: tensors whose gradients become ready at the same time, and what the layer computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    pub(crate) name: String,
    /// Numbers of elements of the layer's tensors.
    pub(crate) tensors: Vec<usize>,
    /// Multiplications and additions of one picture in the forward pass, counted in pairs. The backward pass has about twice
    /// as many: the gradient of the weight, and that of the input.
    pub(crate) work: u64,
}

/// Width and height of a picture, in pixels.
const SIDE: usize = 224;

/// Stages: number of blocks, and channels inside of a block. A block returns four times as many channels.
const STAGES: [(usize, usize); 4] = [(3, 64), (4, 128), (6, 256), (3, 512)];

const CLASSES: usize = 1000;

/// Returns the layers in the order of the backward pass: the last layer comes first, and a layer's batch normalisation before its
/// convolution.
///
/// A block whose input has another shape than its output has a convolution beside the three. Its gradient is put behind those of the
/// three; a trainer may compute it earlier.
pub(crate) fn layers() -> Vec<Layer> {
    let mut layers = Vec::new();
    let mut side = SIDE / 2;
    convolution(&mut layers, "conv1", 3, 64, 7, side);
    // The largest of each 3 × 3 values, with stride 2.
    side /= 2;
    let mut channels = 64;
    for (stage, (blocks, inside)) in STAGES.into_iter().enumerate() {
        for block in 0..blocks {
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let name = |layer: &str| format!("layer{}.{block}.{layer}", stage + 1);
            let outputs = 4 * inside;
            if block == 0 {
                convolution(&mut layers, &name("downsample"), channels, outputs, 1, side / stride);
            }
            convolution(&mut layers, &name("conv1"), channels, inside, 1, side);
            side /= stride;
            convolution(&mut layers, &name("conv2"), inside, inside, 3, side);
            convolution(&mut layers, &name("conv3"), inside, outputs, 1, side);
            channels = outputs;
        }
    }
    layers.push(Layer {
        name: "fc".to_owned(),
        tensors: vec![CLASSES, channels * CLASSES],
        work: (channels * CLASSES) as u64,
    });
    layers.reverse();
    layers
}

/// Adds a convolution whose output has `side` × `side` values in each channel, with its batch normalisation.
fn convolution(
    layers: &mut Vec<Layer>,
    name: &str,
    inputs: usize,
    outputs: usize,
    kernel: usize,
    side: usize,
) {
    let weight = kernel * kernel * inputs * outputs;
    layers.push(Layer {
        name: name.to_owned(),
        // Factor and shift of the batch normalisation, then the weight.
        tensors: vec![outputs, outputs, weight],
        work: (weight * side * side) as u64,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resnet50_has_161_tensors_and_25_557_032_parameters() {
        let layers = layers();
        assert_eq!(layers.len(), 54);
        assert_eq!(layers.iter().map(|layer| layer.tensors.len()).sum::<usize>(), 161);
        assert_eq!(layers.iter().flat_map(|layer| &layer.tensors).sum::<usize>(), 25_557_032);
    }

    /// The count that torchvision states for `resnet50`: 4.09 billion.
    #[test]
    fn resnet50_computes_4_09_billion_pairs_for_a_picture() {
        let work: u64 = layers().iter().map(|layer| layer.work).sum();
        assert_eq!(work / 10_000_000, 408, "{work}");
    }

    #[test]
    fn the_backward_pass_begins_with_the_last_layer() {
        let layers = layers();
        let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
        assert_eq!(names[..4], ["fc", "layer4.2.conv3", "layer4.2.conv2", "layer4.2.conv1"]);
        assert_eq!(names[names.len() - 2..], ["layer1.0.downsample", "conv1"]);
        assert_eq!(layers[0].tensors, [1000, 2_048_000]);
        assert_eq!(layers[1].tensors, [2048, 2048, 512 * 2048]);
        assert_eq!(layers[2].tensors, [512, 512, 9 * 512 * 512]);
        assert_eq!(layers[53].tensors, [64, 64, 3 * 7 * 7 * 64]);
    }
}
