//! Pseudo-random numbers, which are equal in every run.

/// SplitMix64's output function: a bijection in which every input bit reaches every output bit.
#[inline]
pub const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The generator SplitMix64: a sequence of draws that its seed determines.
#[derive(Clone, Debug)]
pub struct SplitMix64 {
    seed: u64,
    drawn: u64,
}

impl SplitMix64 {
    /// Starts the sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self { seed: mix(seed), drawn: 0 }
    }

    /// Draws 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.drawn += 1;
        mix(self.seed.wrapping_add(self.drawn.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Draws one of `0..choices`, each with the same probability: the bias of the remainder is below 2⁻⁶⁰ for
    /// the few choices here.
    pub fn choice(&mut self, choices: usize) -> usize {
        (self.bits() % choices.max(1) as u64) as usize
    }

    /// Draws from the exponential distribution of mean 1: the gap between two arrivals of a Poisson process
    /// of rate 1.
    pub fn gap(&mut self) -> f64 {
        // 53 bits, and never zero, so that the logarithm is finite.
        let uniform = ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        -uniform.ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_of_mean_one_and_finite() {
        let mut draws = SplitMix64::new(7);
        let gaps: Vec<f64> = (0..100_000).map(|_| draws.gap()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!(gaps.iter().all(|gap| gap.is_finite() && *gap >= 0.0));
        assert!((mean - 1.0).abs() < 0.02 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }

    #[test]
    fn choices_are_equally_likely_and_follow_their_seed() {
        let (mut draws, mut again, mut other) = (SplitMix64::new(1), SplitMix64::new(1), SplitMix64::new(2));
        let mut seen = [0u32; 3];
        let mut differs = false;
        for _ in 0..30_000 {
            let choice = draws.choice(3);
            seen[choice] += 1;
            assert_eq!(choice, again.choice(3));
            differs |= choice != other.choice(3);
        }
        assert!(differs && seen.iter().all(|count| (9_500..10_500).contains(count)), "{seen:?}");
    }
}
