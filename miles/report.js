const tip=document.getElementById('tip');
document.querySelectorAll('svg[data-hover]').forEach(svg=>{
  const panels=JSON.parse(svg.dataset.hover),at=svg.querySelector('.at'),box=svg.viewBox.baseVal;
  svg.addEventListener('pointermove',e=>{
    const r=svg.getBoundingClientRect(),x=(e.clientX-r.left)*box.width/r.width;
    const panel=panels.find(p=>x>=p.from-8&&x<=p.to+8);
    if(!panel||!panel.at.length){hide();return}
    const near=panel.at.reduce((a,b)=>Math.abs(b[0]-x)<Math.abs(a[0]-x)?b:a);
    at.setAttribute('x1',near[0]);at.setAttribute('x2',near[0]);
    at.setAttribute('y1',26);at.setAttribute('y2',box.height-28);at.style.visibility='visible';
    tip.textContent='step '+near[1];
    near[2].forEach(([colour,words])=>{
      const row=document.createElement('div'),dot=document.createElement('i');
      dot.className='b'+colour;row.append(dot,words);tip.append(row)});
    tip.style.display='block';
    tip.style.left=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8)+'px';
    tip.style.top=(e.clientY+14)+'px'});
  const hide=()=>{tip.style.display='none';at.style.visibility='hidden'};
  svg.addEventListener('pointerleave',hide)});
