//! Parsers of the values that the options of `compare` take.

use crate::compare::modes::mode::Mode;
use crate::compare::plan::cell::{MAX_BYTES, MAX_INFLIGHT};
use crate::lists::{List, parse_list};
use crate::units::{self, SIZE_FORMS, parse_size};
use crate::workload::Workload;

pub(crate) fn parse_modes(text: &str) -> Result<List<Mode>, String> {
    let accepted = Mode::ALL.map(Mode::name).join(", ");
    parse_list(text, |item| {
        Mode::from_name(item).ok_or_else(|| format!("unknown mode {item:?}; accepted: {accepted}"))
    })
}

pub(crate) fn parse_sizes(text: &str) -> Result<List<u64>, String> {
    parse_list(text, |item| match parse_size(item) {
        Ok(0) => Err(format!("size {item:?} is zero; accepted: 1 to {}", units::size(MAX_BYTES))),
        Ok(bytes) if bytes > MAX_BYTES => {
            Err(format!("size {item:?} is too large; accepted: 1 to {}", units::size(MAX_BYTES)))
        }
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(format!("bad size {item:?}: {error}; accepted: {SIZE_FORMS}")),
    })
}

pub(crate) fn parse_workloads(text: &str) -> Result<List<Workload>, String> {
    parse_list(text, |item| {
        Workload::from_name(item).ok_or_else(|| {
            let accepted: Vec<_> = Workload::all().map(Workload::name).collect();
            format!("unknown workload {item:?}; accepted: {}", accepted.join(", "))
        })
    })
}

/// Smallest and largest rate, in operations offered each second.
const RATES: std::ops::RangeInclusive<f64> = 0.1..=1e6;

pub(crate) fn parse_rates(text: &str) -> Result<List<f64>, String> {
    parse_list(text, |item| match item.parse::<f64>() {
        Ok(rate) if RATES.contains(&rate) => Ok(rate),
        _ => Err(format!(
            "bad rate {item:?}; accepted: numbers from {} to {}, operations each second",
            RATES.start(),
            RATES.end()
        )),
    })
}

pub(crate) fn parse_inflight(text: &str) -> Result<List<usize>, String> {
    parse_list(text, |item| match item.parse() {
        Ok(calls @ 1..=MAX_INFLIGHT) if item.bytes().all(|byte| byte.is_ascii_digit()) => Ok(calls),
        _ => Err(format!(
            "bad number of calls in flight {item:?}; accepted: whole numbers from 1 to {MAX_INFLIGHT}"
        )),
    })
}

/// Smallest and largest ratio.
const RATIOS: std::ops::RangeInclusive<f64> = 0.01..=1000.0;

/// Parses a ratio of throughputs, such as `0.5`.
pub(crate) fn parse_ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if RATIOS.contains(&ratio) => Ok(ratio),
        _ => Err(format!("accepted: numbers from {} to {}", RATIOS.start(), RATIOS.end())),
    }
}

/// Parses `yes` or `no`.
pub(crate) fn parse_yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("accepted: yes, no".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists() {
        assert_eq!(parse_sizes("64, 4KiB").unwrap().0, [64, 4096]);
        assert_eq!(parse_inflight("1,512").unwrap().0, [1, 512]);
        assert_eq!(parse_rates("0.1,1000, 2.5e4").unwrap().0, [0.1, 1000.0, 25_000.0]);
        assert_eq!(
            parse_workloads("vgg16,skew").unwrap().0.iter().map(|w| w.name()).collect::<Vec<_>>(),
            ["vgg16", "skew"]
        );
        assert_eq!(parse_modes("grpc-uds,grpc-tcp").unwrap().0, [Mode::GrpcUds, Mode::GrpcTcp]);
    }

    #[test]
    fn bad_lists_name_the_culprit() {
        let sizes = |text| parse_sizes(text).unwrap_err();
        assert!(sizes("64,1024,1KiB").contains("\"1KiB\" is there twice"));
        assert!(sizes("64,,1").contains("empty"));
        assert!(sizes("").contains("empty"));
        assert!(sizes("0").contains("zero"));
        assert!(sizes("3GiB,1TiB").contains("\"1TiB\""));
        assert!(sizes("1025GiB").contains("too large") && sizes("1025GiB").contains("1024 GiB"));
        assert!(sizes("99999999999GiB").contains("64 bits"));
        assert!(sizes("4KB").contains("\"4KB\""));
        assert!(parse_inflight("0").unwrap_err().contains("\"0\""));
        assert!(parse_inflight("+1").unwrap_err().contains("\"+1\""));
        assert!(parse_inflight("99999999999999999999").unwrap_err().contains("from 1"));
        assert!(parse_modes("grpc-tpc").unwrap_err().contains("grpc-tcp-tuned, grpc-uds, grpc-rdma"));
        let workloads = |text| parse_workloads(text).unwrap_err();
        assert!(workloads("resnet").contains("\"resnet\"") && workloads("resnet").contains("skew, resnet50"));
        assert!(workloads("gru,gru").contains("twice"));
        for bad in ["0", "-1", "nan", "inf", "2e6", "0.01", "50%", "1k", "1,,2"] {
            assert!(
                parse_rates(bad).unwrap_err().contains("empty")
                    || parse_rates(bad).unwrap_err().contains("0.1 to 1000000"),
                "{bad}"
            );
        }
    }

    #[test]
    fn ratios_that_make_no_sense_are_refused() {
        assert_eq!((parse_ratio("0.5"), parse_ratio("2")), (Ok(0.5), Ok(2.0)));
        for bad in ["", "0", "-1", "nan", "inf", "half", "50%", "1e9"] {
            assert!(parse_ratio(bad).unwrap_err().contains("0.01 to 1000"), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_list_brings_the_parsers_down(text in "[0-9a-zA-Z,. -]{0,40}") {
            let _ = parse_sizes(&text);
            let _ = parse_inflight(&text);
            let _ = parse_modes(&text);
            let _ = parse_workloads(&text);
            let _ = parse_rates(&text);
            let _ = parse_ratio(&text);
            let _ = parse_yes_or_no(&text);
        }

        #[test]
        fn distinct_sizes_are_all_kept(sizes in proptest::collection::hash_set(1..=MAX_BYTES, 1..9)) {
            let sizes: Vec<u64> = sizes.into_iter().collect();
            let text = sizes.iter().map(|bytes| units::size(*bytes)).collect::<Vec<_>>().join(",");
            prop_assert_eq!(parse_sizes(&text).map(|list| list.0), Ok(sizes));
        }
    }
}
