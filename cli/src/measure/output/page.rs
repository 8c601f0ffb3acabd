//! The HTML page of a report: one file that needs nothing else.

use std::path::Path;

use tonic_rdma_commands::Failure;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#222}\
h1{font-size:1.5em}table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}\
td,th{padding:.25em .7em;white-space:nowrap;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}\
tr.first td{border-top:2px solid #999}dt{float:left;width:8em;color:#666}dd{margin-left:8em}svg{max-width:100%;height:auto}";

/// The content of a page, from top to bottom.
#[derive(Debug)]
pub(crate) struct Page<'a> {
    pub(crate) title: &'a str,
    /// Names and values.
    pub(crate) facts: Vec<(&'static str, String)>,
    /// The plots, as SVG.
    pub(crate) plots: Vec<String>,
    pub(crate) headings: Vec<&'a str>,
    /// Rows in groups, as texts.
    pub(crate) groups: Vec<Vec<Vec<String>>>,
    /// Paragraphs below the table, one a line.
    pub(crate) legend: String,
}

impl Page<'_> {
    /// Writes the page to `directory`, as `index.html`.
    pub(crate) fn write(&self, directory: &Path) -> Result<(), Failure> {
        let path = directory.join("index.html");
        std::fs::write(&path, self.html())
            .map_err(|error| Failure::run(format!("can't write {}", path.display())).because(error))
    }

    pub(crate) fn html(&self) -> String {
        let title = escape(self.title);
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>{title}</title>\
             <style>{STYLE}</style>\n<h1>{title}</h1>\n<dl>"
        );
        for (name, value) in &self.facts {
            page.push_str(&format!("<dt>{}</dt><dd>{}</dd>\n", escape(name), escape(value)));
        }
        page.push_str("</dl>\n");
        for plot in &self.plots {
            page.push_str(plot);
            page.push('\n');
        }
        page.push_str(&self.table());
        for line in self.legend.lines() {
            page.push_str(&format!("<p>{}</p>\n", escape(line)));
        }
        page.push_str("</html>\n");
        page
    }

    pub(crate) fn table(&self) -> String {
        let headings: String =
            self.headings.iter().map(|heading| format!("<th>{}", escape(heading))).collect();
        let mut table = format!("<table><tr>{headings}</tr>\n");
        for group in &self.groups {
            for (index, row) in group.iter().enumerate() {
                let class = if index == 0 { " class=\"first\"" } else { "" };
                let fields: String = row.iter().map(|text| format!("<td>{}", escape(text))).collect();
                table.push_str(&format!("<tr{class}>{fields}</tr>\n"));
            }
        }
        table.push_str("</table>\n");
        table
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("a<b>&c"), "a&lt;b&gt;&amp;c");
    }
}
